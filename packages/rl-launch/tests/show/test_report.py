"""A run summed up, on a terminal, as JSON and as images."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from shown_rollouts import rollout
from typer.testing import CliRunner

from rl_core.errors import RunDirectoryError
from rl_launch.cli import app
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.run_state import RunState
from rl_launch.show import report_of, show
from rl_launch.show.terminal import FIRST, shortened


def rows(num_steps=12):
    return [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "reward/std": 0.3,
            "train/loss": 2.0 / step,
            "train/lr": 1e-4,
            "policy/nll": None if step == 3 else 1.0,
            "time/generation": 8.0,
            "time/training": 1.0,
            "time/step": 10.0,
        }
        for step in range(1, num_steps + 1)
    ]


ROLLOUTS = [
    rollout("3+4=", "7", 1.0, prompt_id="a"),
    rollout("3+4=", " 7 ", 1.0, prompt_id="a"),
    rollout("5+5=", "11", 0.0, prompt_id="b"),
    rollout("6+6=", "the answer " * 100, 0.5, prompt_id="c"),
    rollout("1+1=", "2", 0.0, prompt_id="d", failure="score raised ZeroDivisionError"),
    rollout("2+1=", "3", 0.0, prompt_id="d", failure="score raised ZeroDivisionError"),
    rollout("9+9=", "18", 0.0, prompt_id="e", failure="the deadline of 30 s passed"),
]


def printed(report, width=80, **settings):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(report, console, **settings)
    return console.export_text()


def test_first_best_and_last_of_each_metric(record):
    report = report_of(record(rows()))
    by_name = {each.name: each for each in report.summaries}
    reward = by_name["reward/mean"]
    assert (reward.first, reward.best, reward.best_step, reward.last) == (
        0.1,
        pytest.approx(1.2),
        12,
        pytest.approx(1.2),
    )
    assert by_name["train/lr"].best is None
    assert [step for step, _ in report.series["policy/nll"]] == [1, 2, *range(4, 13)]


@pytest.mark.parametrize(
    ("others", "name", "has_best"),
    [
        ({}, "train/loss", True),  # of SFT
        ({"policy/nll": 1.0}, "train/loss", False),
        ({"policy/nll": 1.0}, "val/loss", True),
        ({}, "mismatch/kl", False),
        ({}, "mismatch/mean", False),
        ({}, "rollout/truncated", True),
    ],
)
def test_a_metric_has_a_best_value_if_one_end_is_better(record, others, name, has_best):
    [found] = [
        each
        for each in report_of(record([{"step": step, name: 0.1 * step, **others} for step in (1, 2)])).summaries
        if each.name == name
    ]
    assert (found.best is not None) == has_best


GRPO = dict.fromkeys(("weight_version", "train/loss", "val/reward", "mismatch/mean", "policy/nll"), 0.5) | {
    "rollout/truncated": 0.0,
    "mismatch/kl": 4e-14,
}


def test_the_table_opens_with_the_metrics_to_look_at_first(record):
    report = report_of(record([{"step": step, "reward/mean": 0.1 * step, **GRPO} for step in (1, 2)]))
    table = printed(report).partition("at step")[2]
    lines = [line.split()[0] for line in table.splitlines()[1:6]]
    assert lines == list(FIRST)
    assert "mismatch/kl" not in table
    assert "3 more metrics: rl show RUN --all" in table
    assert "constant: val/reward 0.5" in printed(report, lists_all=True)
    assert "mismatch/kl 4e-14" in " ".join(printed(report, lists_all=True).split())


def test_the_parts_of_the_reward_follow_it_in_the_table(record):
    parts = {"reward/correct": 0.5, "reward/short": 0.2}
    report = report_of(
        record([{"step": step, "reward/std": 0.1, "reward/mean": 0.7, **GRPO, **parts} for step in (1, 2)])
    )
    table = printed(report).partition("at step")[2]
    mean, *others = FIRST
    lines = [line.split()[0] for line in table.splitlines()[1 : 1 + len(FIRST) + len(parts)]]
    assert lines == [mean, *parts, *others]


def test_rollouts_of_which_none_is_selected_lead_to_other_steps(record):
    run = record(rows(), {12: ROLLOUTS})
    answer = CliRunner().invoke(app, ["show", str(run.path), "--where", "reward>5"])
    assert "0 selected; --step N selects from another step" in answer.stdout


def test_a_run_without_rewards_shows_its_losses(record):
    report = report_of(record([{"step": step, "val/loss": 1 / step, "train/lr": 1e-4} for step in (1, 2)]))
    assert "val/loss" in printed(report)
    assert "train/lr" not in printed(report)


def test_samples_are_the_best_and_the_worst_of_the_most_mixed_prompts(record):
    rewards = {"a": (1.0, 0.2, 0.9), "b": (0.5, 0.4), "c": (9.0, 9.0), "d": (-3.0,)}
    some = [rollout(name, str(each), each, prompt_id=name) for name, group in rewards.items() for each in group]
    report = report_of(record(rows(), {12: some}))
    found = report.rollouts
    assert [(each.prompt, each.reward) for each in found.best] == [("a", 1.0), ("b", 0.5)]
    assert [(each.prompt, each.reward) for each in found.worst] == [("a", 0.2), ("b", 0.4)]
    text = printed(report)
    assert "best of the most mixed group: reward 1," in text
    assert "worst of the most mixed group: reward 0.2," in text
    assert "worst of the second most mixed group: reward 0.4," in text


def test_samples_of_prompts_with_equal_rewards_are_of_different_prompts_and_failures_are_counted(record):
    found = report_of(record(rows(), {1: [], 12: ROLLOUTS})).rollouts
    assert (found.step, found.num_rollouts) == (12, 7)
    assert [(each.prompt, each.reward) for each in found.best] == [("3+4=", 1.0), ("6+6=", 0.5)]
    assert [(each.prompt, each.reward) for each in found.worst] == [("5+5=", 0.0), ("3+4=", 1.0)]
    assert found.failures == {"score raised ZeroDivisionError": 2, "the deadline of 30 s passed": 1}


def test_folders_that_other_libraries_load_are_named(record):
    run = record(rows())
    for step, folder in ((6, "hf"), (12, "hf"), (12, "adapter")):
        (run.path / f"checkpoints/step_{step}/{folder}").mkdir(parents=True)
        CheckpointManifest(step).write(run.path / f"checkpoints/step_{step}")
    newest = run.path / "checkpoints/step_12"
    report = report_of(run)
    assert report.exports == {"model": str(newest / "hf"), "adapter": str(newest / "adapter")}
    assert f"saved adapter {newest / 'adapter'}" in printed(report)


def test_a_step_shows_the_run_up_to_it(record):
    run = record(rows(), {4: ROLLOUTS, 12: ROLLOUTS})
    report = report_of(run, 4)
    assert report.rollouts.step == 4
    assert report.timings["step"] == 40.0
    assert report.series["train/loss"][-1][0] == 4
    with pytest.raises(RunDirectoryError, match="no metrics of step 99; it has 1 to 12"):
        report_of(run, 99)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_report_fits_the_terminal(record, width):
    text = printed(report_of(record(rows(), {12: ROLLOUTS})), width)
    body = text.splitlines()[1:]  # the first line is the path of the run
    assert max(len(line) for line in body) <= width


def test_a_report_says_what_people_look_for(record):
    text = printed(report_of(record(rows(), {12: ROLLOUTS})), lists_all=True)
    assert "step 12" in text
    assert "reward/mean" in text
    words = " ".join(text.split())
    assert "constant: policy/nll 1, reward/std 0.3, train/lr 0.0001 phase" in words
    assert "generation 1:36 80%" in words
    assert "the rest 12 s 10%" in words
    assert "highest reward 1, 1 tokens, stop" in text
    assert "2 failed: score raised ZeroDivisionError" in text
    assert "generation takes 80% of the time" in text
    assert "policy.generation.vllm_cfg" in words


def test_verdicts_of_judges_are_beside_the_response(record):
    verdicts = [{"judge": "critic", "answer": '{"score": 1}', "value": 1}, {"judge": "helpful", "value": 0.25}] * 4
    judged = {**rollout("3+4=", "7", 1.0), "verdicts": verdicts}
    words = " ".join(printed(report_of(record(rows(), {12: [judged]})), lists_all=True).split())
    assert 'verdict critic: {"score": 1} verdict helpful: 0.25' in words
    assert "2 more verdicts: see rl view" in words


def test_readings_of_single_machines_are_in_the_json_and_not_in_the_table(record):
    readings = {"system/gpu_utilization": 0.5, "system/node0/cpu_utilization": 0.25, "system/node0/gpu1/power_w": 300.0}
    report = report_of(
        record([row | {name: value * row["step"] for name, value in readings.items()} for row in rows()])
    )
    text = printed(report, lists_all=True)
    assert "system/gpu_utilization" in text
    assert "system/node0" not in text
    assert set(readings) <= {each["name"] for each in report.as_json()["summaries"]}


def test_reasons_of_failures_in_any_step_are_in_the_advice(record):
    failing = [{**row, "rollout/failed": float(row["step"] in (2, 4))} for row in rows()]
    flaky = [rollout(str(each), "x", 0.0, failure=f"score raised ValueError: '{each}'") for each in range(2)]
    hung = [rollout("q", "x", 0.0, failure="it hung"), rollout("r", "x", 1.0)]
    [found] = [
        each for each in report_of(record(failing, {2: flaky, 4: hung, 12: ROLLOUTS})).advice if "failed" in each.found
    ]
    assert found.found == (
        "2 rollouts failed, in 2 steps, the last of them 4: 2 x score raised ValueError: '0'; 1 x it hung"
    )
    assert "--where status=failed --step 4" in found.remedy


def test_a_run_without_steps_refers_to_its_log(record):
    report = report_of(record([]))
    assert "No steps are recorded. See logs/driver.log" in printed(report)
    failed = replace(report, state=RunState("failed"))
    assert "No steps are recorded. See logs/error.log" in printed(failed)


def test_a_long_text_keeps_its_beginning_and_end():
    text = " ".join(str(number) for number in range(500))
    short = shortened(text, 100)
    assert len(short) == 100
    assert short.startswith("0 1 2")
    assert short.endswith("498 499")
    assert shortened("a\n  b", 100) == "a b"


def test_the_command_prints_json(record):
    run = record(rows(), {12: ROLLOUTS})
    answer = CliRunner().invoke(app, ["show", str(run.path), "--json"])
    data = json.loads(answer.stdout)
    assert data["schema"] == 1
    assert data["rollouts"]["num_rollouts"] == 7
    assert data["state"]["step"] == 12
    assert data["advice"][0]["found"] == "generation takes 80% of the time"


def test_the_command_refuses_what_is_not_a_run(tmp_path):
    answer = CliRunner().invoke(app, ["show", str(tmp_path / "nowhere")])
    assert answer.exit_code == 2
    assert "there is no run at" in answer.stderr


def test_the_command_writes_images(record, tmp_path):
    pytest.importorskip("matplotlib")
    run = record(rows())
    answer = CliRunner().invoke(app, ["show", str(run.path), "--png", str(tmp_path / "plots")])
    assert answer.exit_code == 0, answer.output
    written = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in written] == ["policy.png", "reward.png", "train.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_images_without_matplotlib_are_refused_with_the_command(record, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_launch.show.images.importlib.util.find_spec", lambda name: None)
    run = record(rows())
    answer = CliRunner().invoke(app, ["show", str(run.path), "--png", str(tmp_path / "plots")])
    assert answer.exit_code == 2
    assert "--png needs matplotlib" in answer.stderr
    assert "pip install 'rl-launch[plot]'" in answer.stderr
    assert not (tmp_path / "plots").exists()
