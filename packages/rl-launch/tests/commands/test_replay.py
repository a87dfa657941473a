import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.commands.replay import STAGES, compared, replay, tensor_digest
from rl_launch.session.directory.run_folder import RunFolder

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
