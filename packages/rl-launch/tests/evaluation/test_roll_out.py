"""Evaluations on a scripted generator, with numbers computed by hand."""

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from scripted import Killed, ScriptedPool, make_plan, make_prompt, make_task
from typer.testing import CliRunner

from rl_algos.data.contamination import Overlap
from rl_core.config import Config
from rl_core.errors import ConfigError, RolloutsFailed, RunDirectoryError
from rl_launch.cli import app
from rl_launch.commands.evaluate import _result, roll_out
from rl_launch.evaluation.folder import EvaluationFolder
from rl_launch.evaluation.result import EvaluationResult, compare_results, show_comparison, show_result

IDENTITY = {"the model": "a", "prompts": "b"}


class AnyConfig(Config):
    algorithm: str = "evaluation"


def evaluate(folder, plan, script, *, killed_after=None, identity=IDENTITY):
    """An evaluation in a folder, and the pool that it had."""
    place, pool = EvaluationFolder(folder), ScriptedPool(script, killed_after)
    done = place.open(identity, AnyConfig(), {task.name: task.num_samples for task in plan.tasks})
    try:
        done |= roll_out(plan, pool, place, done, Console(quiet=True))
        result = _result(place, "model", plan, done)
        place.write_result(result.as_json())
        return result, pool
    finally:
        place.close()


SCRIPT = {
    0: [("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0)],
    1: [("1", 0.0), ("2", 1.0), ("1", 0.0), ("3", 0.0)],
    2: [(None, 0.0)] * 4,
}


def test_hand_computed_estimates_of_a_scripted_generator(tmp_path):
    result, _ = evaluate(tmp_path, make_plan(make_task(3, num_samples=4), k=(1, 2, 4)), SCRIPT.__getitem__)
    summary = result.tasks["sums"]
    values = {name: estimate.value for name, estimate in summary.estimates.items()}
    assert values == pytest.approx(
        {
            "mean": (0.5 + 0.25 + 0) / 3,
            "pass@1": (0.5 + 0.25 + 0) / 3,
            "pass@2": (5 / 6 + 0.5 + 0) / 3,
            "pass@4": 2 / 3,
            "cons@2": (0.5 + 0.25 + 0) / 3,
            "cons@4": (0.5 + 0 + 0) / 3,
        }
    )
    assert (summary.num_failed, summary.failures) == (4, {"the verifier hung": 4})
    # of the 27 resamples of three prompts, the worst is 0 and the best 0.5, each with a probability of 1/27
    assert (summary.estimates["mean"].low, summary.estimates["mean"].high) == (0.0, 0.5)
    assert result.mean_reward == pytest.approx(0.25)


def test_prompts_without_room_score_zero_and_are_counted(tmp_path):
    task = make_task(1, refused=[(make_prompt(7), "context overflow: 40 tokens")])
    result, _ = evaluate(tmp_path, make_plan(task), lambda _: [("4", 1.0)])
    summary = result.tasks["sums"]
    assert (summary.mean, summary.num_prompts, summary.num_failed) == (0.5, 2, 1)
    assert "context overflow" in next(iter(summary.failures))


def right_for_half(number):
    return [(str(number), float(number % 2))]


def test_an_evaluation_of_2000_prompts_that_was_killed_half_way_goes_on_with_the_others(tmp_path):
    plan = make_plan(make_task(2000))
    whole, _ = evaluate(tmp_path / "whole", plan, right_for_half)
    with pytest.raises(Killed):
        evaluate(tmp_path / "killed", plan, right_for_half, killed_after=1000)
    resumed, pool = evaluate(tmp_path / "killed", plan, right_for_half)
    assert len(pool.submitted) == 1000
    assert (resumed.tasks, resumed.prompts) == (whole.tasks, whole.prompts)
    lines = [json.loads(line) for line in (tmp_path / "killed" / "rollouts.jsonl").read_text().splitlines()]
    assert len({line["prompt_id"] for line in lines}) == len(lines) == 2000
    assert {line["task"] for line in lines} == {"sums"}


@pytest.mark.parametrize("kept_bytes", [1, 100, -1])
def test_a_group_that_was_being_written_is_rolled_out_again(tmp_path, kept_bytes):
    plan = make_plan(make_task(3, num_samples=4))
    whole, _ = evaluate(tmp_path, plan, SCRIPT.__getitem__)
    path = tmp_path / "rollouts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:kept_bytes])
    resumed, pool = evaluate(tmp_path, plan, SCRIPT.__getitem__)
    assert len(pool.submitted) == 2
    assert resumed.tasks == whole.tasks
    assert len(path.read_bytes().splitlines()) == 12


def test_a_finished_evaluation_is_only_summarised_again(tmp_path):
    plan = make_plan(make_task(3))
    evaluate(tmp_path, plan, right_for_half)
    again, pool = evaluate(tmp_path, make_plan(make_task(3), k=()), right_for_half)
    assert pool.submitted == []
    assert set(again.tasks["sums"].estimates) == {"mean"}


def test_an_evaluation_of_something_else_is_refused(tmp_path):
    evaluate(tmp_path, make_plan(make_task(1)), right_for_half)
    with pytest.raises(RunDirectoryError, match="an evaluation of something else: the model differs"):
        evaluate(tmp_path, make_plan(make_task(1)), right_for_half, identity={**IDENTITY, "the model": "c"})


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunDirectoryError, match=r"do not belong to an evaluation \(metrics.jsonl\)"):
        EvaluationFolder(tmp_path).check()


def test_an_evaluation_in_which_everything_failed_ends_with_the_reason_and_begins_anew(tmp_path):
    plan = make_plan(make_task(2))
    with pytest.raises(RolloutsFailed, match="all 2 samples of sums failed: 2 x the verifier hung"):
        evaluate(tmp_path, plan, lambda _: [(None, 0.0)])
    result, pool = evaluate(tmp_path, plan, right_for_half)
    assert len(pool.submitted) == 2
    assert result.tasks["sums"].num_failed == 0


def test_a_result_reads_back_equal(tmp_path):
    result, _ = evaluate(tmp_path, make_plan(make_task(3, num_samples=4), k=(2,)), SCRIPT.__getitem__)
    assert EvaluationResult.read(tmp_path) == result
    assert EvaluationResult.read(tmp_path / "eval.json") == result
    assert "mean 0.25, pass@2" in repr(result)
    overlap = Overlap("copied", "rows.jsonl, line 7", 0.75)
    searched = replace(result, contamination={"sums": {result.prompts["sums"][1].id: overlap}})
    (tmp_path / "eval.json").write_text(json.dumps(searched.as_json()))
    assert EvaluationResult.read(tmp_path) == searched
    console = Console(file=StringIO(), width=200)
    show_result(searched, console)
    others = np.mean([np.mean(each.rewards) for each in result.prompts["sums"][::2]])
    assert "sums: of 3 prompts, the training rows contain 1 and have 0 similar ones" in console.file.getvalue()
    assert "copied (75%) in rows.jsonl, line 7" in console.file.getvalue()
    assert f"sums: mean {others:.4g} on the other 2 prompts" in console.file.getvalue()
    with pytest.raises(ConfigError, match="is not the result of an evaluation"):
        EvaluationResult.read(tmp_path / "nothing")
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(ConfigError, match="KeyError"):
        EvaluationResult.read(tmp_path)


def test_two_results_are_compared_prompt_by_prompt(tmp_path):
    plan = make_plan(make_task(400))
    first, _ = evaluate(tmp_path / "first", plan, right_for_half)
    second, _ = evaluate(tmp_path / "second", plan, lambda number: [("4", float(number % 4 != 0))])
    found = compare_results(first, second)["sums"]
    assert (found.first, found.second, found.num_better, found.num_worse) == (0.5, 0.75, 100, 0)
    assert found.is_significant
    assert not compare_results(first, first)["sums"].is_significant
    longer, _ = evaluate(tmp_path / "longer", make_plan(make_task(500)), right_for_half)
    assert compare_results(first, longer)["sums"].num_only_second == 100
    other, _ = evaluate(tmp_path / "other", make_plan(make_task(5, name="words")), right_for_half)
    with pytest.raises(ConfigError, match="no task in common: sums and words"):
        compare_results(first, other)


def test_tables_show_every_task_and_what_failed_in_80_columns(tmp_path):
    result, _ = evaluate(tmp_path, make_plan(make_task(3, num_samples=4), k=(2,)), SCRIPT.__getitem__)
    console = Console(width=80, record=True, file=StringIO())
    show_result(result, console)
    show_comparison(result, result, compare_results(result, result), console)
    text = console.export_text()
    for words in ("pass@2", "0 to 0.5", "failed samples score 0: 4 x the verifier hung", "not significant"):
        assert words in text, text


def shown(*arguments, code=0):
    answer = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert answer.exit_code == code, answer.output
    return answer.output


def test_rl_show_shows_an_evaluation_and_selects_its_rollouts(tmp_path):
    result, _ = evaluate(tmp_path, make_plan(make_task(3, num_samples=4), k=(2,)), SCRIPT.__getitem__)
    text = shown(tmp_path)
    assert "pass@2" in text
    assert "Rollouts of the evaluation: 12" in text
    assert "best of the" in text
    selected = shown(tmp_path, "--where", "status=failed", "--limit", "1")
    assert "4 selected, 1 shown" in selected
    assert "pass@2" not in selected
    found = json.loads(shown(tmp_path, "--json"))
    assert found["result"] == json.loads(json.dumps(result.as_json()))
    assert found["rollouts"]["num_rollouts"] == 12
    assert "--step is for runs" in shown(tmp_path, "--step", "2", code=2)


def test_rl_show_shows_an_evaluation_that_is_not_finished(tmp_path):
    with pytest.raises(Killed):
        evaluate(tmp_path, make_plan(make_task(4)), right_for_half, killed_after=2)
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"cut')
    text = shown(tmp_path)
    assert f"is not finished; continue it with rl eval {tmp_path}" in text.replace("\n", "")
    assert "Rollouts of the evaluation: 2" in text
    assert json.loads(shown(tmp_path, "--json"))["result"] is None
