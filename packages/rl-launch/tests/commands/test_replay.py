import json
import math
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_launch.commands.replay import STAGES, Breakpoints, OneRow, compared, replay, tensor_digest
from rl_launch.run_session.directory.run_folder import RunFolder

METRICS = {
    "step": 4,
    "rollout/mean_length": 3.0,
    "reward/mean": 0.5,
    "advantage/max": 1.0,
    "train/loss": 0.25,
    "train/grad_norm": 2.0,
    "val/accuracy": 0.5,
    "policy/kl": math.nan,
    "time/step": 1.0,
    "critic/flops_per_second": 2.0,
}


def write(folder, metrics=(), record=(), weight=1.0):
    """Write a run with one step of one rollout."""
    (folder / "rollouts").mkdir(parents=True)
    for name in ("run.json", "config.yaml"):
        (folder / name).write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({**METRICS, **dict(metrics)}) + "\n")
    rollout = {"prompt_id": "a", "index": 0, "turns": [{"text": "4"}], "status": "ok", "rewards": {"reward": 1.0}}
    (folder / "rollouts/step_4.jsonl").write_text(json.dumps({**rollout, "advantage": 0.5, **dict(record)}) + "\n")
    model = folder / "checkpoints/step_4/hf/model.safetensors"
    model.parent.mkdir(parents=True)
    save_file({"w": np.full(3, weight)}, model, metadata={"format": "pt"})
    return RunFolder(folder)


@pytest.mark.parametrize(
    ("changed", "stage", "what"),
    [
        ({"record": {"turns": [{"text": "5"}]}}, "rollouts", "text of rollout 0 (prompt a, number 0)"),
        ({"record": {"rewards": {"reward": 0.0}}}, "rewards", "rewards of rollout 0 (prompt a, number 0)"),
        ({"metrics": {"reward/mean": 0.25}}, "rewards", "reward/mean"),
        ({"record": {"advantage": 0.25}}, "advantages", "advantage of rollout 0 (prompt a, number 0)"),
        ({"metrics": {"train/loss": 0.5}}, "loss", "train/loss"),
        ({"metrics": {"train/grad_norm": 2.5}}, "gradient", "train/grad_norm"),
        ({"weight": 2.0}, "update", "weights in hf/model.safetensors"),
        ({"metrics": {"val/accuracy": 0.25}}, "validation", "val/accuracy"),
    ],
)
def test_what_differs_is_named_at_its_stage(tmp_path, changed, stage, what):
    run, other = write(tmp_path / "run"), write(tmp_path / "other", **changed)
    found = {each.name: each.differences for each in compared(run, other, 4)}
    assert list(found) == [name for name in STAGES if name != "logprobs"]
    assert {name for name, differences in found.items() if differences} == {stage}
    assert found[stage][0].what == what


def test_equal_steps_have_no_difference_whatever_their_times(tmp_path):
    clock = {"time/step": 9.0, "critic/flops_per_second": 1.0}
    run, other = write(tmp_path / "run"), write(tmp_path / "other", metrics=clock)
    assert not any(stage.differences for stage in compared(run, other, 4))


def test_the_digest_of_tensors_does_not_depend_on_the_order_of_the_metadata(tmp_path):
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"a": "1", "b": "2"}}
    files = []
    for name, order in (("first", header), ("second", dict(reversed(header.items())))):
        text = json.dumps(order).encode()
        files.append(tmp_path / name)
        files[-1].write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
    assert tensor_digest(files[0]) == tensor_digest(files[1]) != tensor_digest(tmp_path / "none") == ""


def test_a_step_that_cannot_be_made_again_is_refused(tmp_path):
    run = write(tmp_path / "run")
    with pytest.raises(ConfigError, match="names no step of a run; give it as RUN:STEP"):
        replay(str(run.path), ())
    with pytest.raises(RunDirectoryError, match="has no step 7; it has made 4 steps"):
        replay(f"{run.path}:7", ())
    with pytest.raises(RunDirectoryError, match="has no checkpoint before step 4"):
        replay(f"{run.path}:4", ())


def test_damaged_records_are_found_before_the_steps_are_made_again(tmp_path):
    run = write(tmp_path / "run")
    saved = run.path / "checkpoints/step_2"
    saved.mkdir()
    (saved / "manifest.json").write_text('{"files": []}')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl has no step 3, which lies between .* and step 4"):
        replay(f"{run.path}:4", ())
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({**METRICS, "step": step}) + "\n" for step in (3, 4)))
    path = run.path / "rollouts/step_4.jsonl"
    path.write_text(path.read_text()[:40])
    with pytest.raises(RunDirectoryError, match=r"rollouts of step 4 in .*rollouts cannot be read .* Restore the file"):
        replay(f"{run.path}:4", ())
    assert not (run.path / "replays").exists()


def test_a_damaged_model_is_named_with_the_remedy(tmp_path):
    run, other = write(tmp_path / "run"), write(tmp_path / "other")
    model = run.path / "checkpoints/step_4/hf/model.safetensors"
    model.write_bytes(model.read_bytes()[:12])
    with pytest.raises(RunDirectoryError, match=r"model\.safetensors cannot be read .* Restore the file"):
        list(compared(run, other, 4))


LOOP = """
def loop(observer, step):
    observer.begin_step(step)
    groups = ["a group"]
    observer.begin_phase("logprobs")
    batch = "logprobs"
    observer.end_phase("logprobs")
    batch = "advantages"
    observer.begin_phase("training")
    updates = ["an update"]
    observer.end_phase("training")
"""
"""Phases of a step, in a module of an algorithm."""

SEEN = []


def see(step, variables):
    SEEN.append((step, {name: variables[name] for name in ("groups", "batch", "updates") if name in variables}))


def fail(step, variables):
    raise KeyError("nothing")


@pytest.fixture
def loop():
    module = {"__name__": "rl_algos.made.loop"}
    exec(LOOP, module)
    return module["loop"]


@pytest.mark.parametrize(
    ("stage", "variables"),
    [
        ("rollouts", {"groups": ["a group"]}),
        ("rewards", {"groups": ["a group"]}),
        ("logprobs", {"groups": ["a group"], "batch": "logprobs"}),
        ("advantages", {"groups": ["a group"], "batch": "advantages"}),
        ("loss", {"groups": ["a group"], "batch": "advantages", "updates": ["an update"]}),
    ],
)
def test_a_function_gets_the_variables_of_the_loop_at_its_stage(loop, stage, variables):
    SEEN.clear()
    observer = Breakpoints(4, {stage: f"{__file__}:see"})
    sys.modules[observer._wanted[stage].__module__].SEEN = SEEN
    for step in (3, 4, 5):
        loop(observer, step)
    assert [(4, variables)] == SEEN


def test_the_debugger_shows_the_variables_of_the_loop_and_goes_on(loop, monkeypatch, capsys):
    commands = iter(["p groups, batch", "c"])
    monkeypatch.setattr("rl_launch.commands.replay._debugger", lambda: made)
    from pdb import Pdb

    made = Pdb(stdout=sys.stdout, nosigint=True)
    made.use_rawinput = True
    monkeypatch.setattr("builtins.input", lambda prompt: next(commands))
    loop(Breakpoints(4, {"advantages": ""}), 4)
    found = capsys.readouterr()
    assert "(['a group'], 'advantages')" in found.out
    assert "step 4, advantages: the variables of the loop are at hand" in found.err


def test_stages_and_functions_that_do_not_exist_are_refused_and_failures_are_kept(loop):
    with pytest.raises(ConfigError, match=r"--break lunch: there is no such stage\. The stages are rollouts, rewards"):
        Breakpoints(4, {"lunch": ""})
    with pytest.raises(ConfigError, match="--break loss="):
        Breakpoints(4, {"loss": f"{__file__}:nothing_of_this_name"})
    observer = Breakpoints(4, {"loss": f"{__file__}:fail", "validation": f"{__file__}:fail"})
    loop(observer, 4)
    assert observer.unreached == ("validation",)
    assert str(observer.failure) == "--break loss: the function raised KeyError: 'nothing'"


def group_of(prompt):
    def rollout(place):
        return Rollout(
            prompt_id=prompt.id,
            tokens=np.array([1, 2, 3], np.int32),
            loss_mask=np.array([0, 1, 1], np.uint8),
            generation_logprobs=np.zeros(3, np.float32),
            spans=(WeightSpan(1, 2),),
            turns=(Turn("2 3", None, {"reward": float(place)}),),
            rewards={"reward": float(place)},
            stop_reason="stop",
        )

    return RolloutGroup.of(prompt, [rollout(place) for place in range(3)])


def test_one_row_alone_keeps_all_rewards_and_masks_all_other_rollouts_of_its_step():
    prompts = [Prompt(name, (), np.array([1], np.int32), "math") for name in ("a", "b", "c")]
    records = [{"prompt_id": name, "index": index} for name in ("a", "b") for index in range(3)]
    alone = OneRow(records, 4)
    groups = [group_of(prompt) for prompt in prompts]
    trained = [list(alone(group).columns.ragged(LOSS_MASK)) for group in groups]
    nothing, all_of_it = [0, 0, 0], [0, 1, 1]
    assert [[row.tolist() for row in rows] for rows in trained] == [
        [nothing, nothing, nothing],
        [nothing, all_of_it, nothing],
        [all_of_it, all_of_it, all_of_it],
    ]
    assert [alone(group).rewards().tolist() for group in groups] == [group.rewards().tolist() for group in groups]
    with pytest.raises(RunDirectoryError, match="--row 6: there is no such row; the step has the rollouts 0 to 5"):
        OneRow(records, 6)
    with pytest.raises(RunDirectoryError, match="the step has recorded no rollouts"):
        OneRow(None, 0)
