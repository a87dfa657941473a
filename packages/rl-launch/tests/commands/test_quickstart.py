import io
import json
import signal

import pytest
from rich.console import Console

from rl_launch.commands import quickstart
from rl_launch.commands.quickstart import Quickstart
from rl_launch.commands.train import TrainOutcome
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.run_state import RunState

ACCURACY = {"initial": 0.01, "sft": 0.5, "grpo": 0.875}


def test_a_stage_that_a_signal_ended_is_followed_by_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(quickstart, "train", lambda config, **_: TrainOutcome({}, signal.SIGTERM))
    stages = Quickstart(tmp_path, Console(), ())
    with pytest.raises(SystemExit) as ended:
        stages.fine_tune(stages.make_model())
    assert ended.value.code == 128 + signal.SIGTERM
    assert "SIGTERM ended the run before its last step" in caplog.text


def finish(folder, *names):
    """A quickstart whose runs of these names have finished."""
    for name in names:
        checkpoint = folder / name / "checkpoints/step_2"
        checkpoint.mkdir(parents=True)
        CheckpointManifest(2).write(checkpoint)
        for file in ("run.json", "config.yaml"):
            (folder / name / file).write_text("{}")
        RunState("finished", 2, 2).write(folder / name)
    summary = {"accuracy": ACCURACY, "seconds": {"total": 85.0}, "model": "there"}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_quickstart_that_is_finished_shows_what_it_found_and_starts_nothing(tmp_path, monkeypatch):
    finish(tmp_path, "sft", "grpo")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    text = io.StringIO()
    monkeypatch.setattr(quickstart, "make_tiny_model", lambda folder: pytest.fail("a stage began"))
    quickstart.run(tmp_path, console=Console(file=text, width=200))
    assert "87.5 %" in text.getvalue()
    assert f"policy.model_name={tmp_path}/grpo/checkpoints/step_2/hf" in text.getvalue()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_quickstart_that_was_cut_short_is_not_finished(tmp_path):
    finish(tmp_path, "sft")
    assert not Quickstart(tmp_path, Console(), ()).is_finished
