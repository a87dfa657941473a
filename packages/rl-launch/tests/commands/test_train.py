"""Runs that have nothing left to do, and folders that no run could have, are known before Ray or torch is imported."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core.config import WhenChanged, keys_when_changed
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.commands.preparation import check_adapters_of_made_models, check_run_dir
from rl_launch.commands.train import keep_warmed_up, train, with_local_models
from rl_launch.model_files.local_models import WARMED_UP
from rl_launch.run_config.reading import RunRecording, read_plan
from rl_launch.run_session import RunDirectory
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.branch import BranchPoint
from rl_launch.run_session.directory.run_state import RunState

COMMAND = """
import atexit, sys
from rl_launch.cli import main
atexit.register(lambda: print([name for name in ("ray", "torch") if name in sys.modules]))
main()
"""


def plan_of(*overrides):
    return read_plan("sft-arithmetic", overrides)


def finish(path, plan, *, step=400, reason=""):
    """A run as it is left when it has finished."""
    directory = RunDirectory(path, RunRecording())
    directory.open(plan.config)
    directory.close()
    checkpoint = path / "checkpoints" / f"step_{step}"
    checkpoint.mkdir()
    CheckpointManifest(step).write(checkpoint)
    goals = keys_when_changed(plan.config, WhenChanged.GOAL)
    RunState("finished", step, 400, reason, goals).write(path)
    (path / "metrics.jsonl").write_text(json.dumps({"step": step, "train/loss": 0.5, "val/loss": None}) + "\n")
    return path


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "run.lock"}


def test_a_run_whose_goal_is_met_is_left_as_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = plan_of()
    run = finish(tmp_path / "run", settings, step=150, reason="val/loss is 0.5, the goal was 0.6")
    before = contents(run)
    outcome = train(settings, run_dir=run)
    assert outcome.metrics == {"train/loss": 0.5}
    assert contents(run) == before
    assert f"{run}: finished at step 150 of 400 (val/loss is 0.5, the goal was 0.6)." in caplog.text


def test_a_finished_run_says_so_before_ray_or_torch_is_imported(tmp_path):
    run = finish(tmp_path / "run", plan_of())
    answer = subprocess.run(
        [sys.executable, "-c", COMMAND, "train", str(run)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert f" sft.max_num_steps: rl train {run} sft.max_num_steps=800" in answer.stderr
    assert answer.stdout == f"{run}\n[]\n"


def test_a_branch_begins_in_a_folder_of_its_own(tmp_path):
    run, other = finish(tmp_path / "run", plan_of()), finish(tmp_path / "other", plan_of())
    longer = plan_of("sft.max_num_steps=800")
    with pytest.raises(RunDirectoryError, match="other already holds a run that did not branch from"):
        check_run_dir(other, longer, fresh=False, branch_point=BranchPoint.parse(str(run)))
    branch = check_run_dir(tmp_path / "new", longer, fresh=False, branch_point=BranchPoint.parse(str(run)))
    assert branch is not None
    assert branch.step == 400
    assert not (tmp_path / "new").exists()


def test_a_branch_goes_on_in_its_folder_by_the_same_command(tmp_path):
    run, longer = finish(tmp_path / "run", plan_of()), plan_of("sft.max_num_steps=800")
    point = BranchPoint.parse(f"{run}:400")
    directory = RunDirectory(tmp_path / "new", RunRecording())
    directory.open(longer.config, branch=check_run_dir(tmp_path / "new", longer, fresh=False, branch_point=point))
    directory.close()
    assert check_run_dir(tmp_path / "new", longer, fresh=False, branch_point=point) is None
    assert directory.branch is not None
    assert directory.branch.run_dir == run


def test_adapters_on_layers_that_a_made_model_does_not_have_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    adapters = "policy.lora_cfg={{enabled: true, match_all_linear: false, target_modules: [{}]}}"
    message = r'policy\.lora_cfg\.target_modules: got "q_projj": .*q_proj\?'
    with pytest.raises(ConfigError, match=message):
        check_adapters_of_made_models(plan_of(adapters.format("q_projj")))
    check_adapters_of_made_models(plan_of(adapters.format("q_proj")))


def test_a_warmed_up_model_that_another_run_makes_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, "rl_launch")
    holders = iter(["process 7", "process 7", None])
    events = []
    monkeypatch.setattr("rl_launch.commands.train.holder", lambda _: next(holders))
    monkeypatch.setattr("time.sleep", lambda _: events.append("waited"))

    def trained(plan, *, run_dir, title):
        events.append("trained")
        (finish(run_dir, plan, reason="it is finished") / "checkpoints/step_400/hf").mkdir()
        return SimpleNamespace(exit_if_stopped=lambda: None)

    monkeypatch.setattr("rl_launch.commands.train.train", trained)
    with_local_models(read_plan("grpo-arithmetic", ["policy.model_name=tiny-arithmetic-sft"]))
    assert events == ["waited", "trained"]
    assert "waiting for process 7, which trains tiny-arithmetic-sft by sft-arithmetic" in caplog.text


@pytest.mark.parametrize("name", WARMED_UP)
def test_a_warmed_up_model_is_the_export_of_its_recipes_run(tmp_path, monkeypatch, name):
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    made = []

    def made_at_once(plan, *, run_dir, title):
        made.append(run_dir)
        (finish(run_dir, plan, reason="it is finished") / "checkpoints/step_400/hf").mkdir()
        return SimpleNamespace(exit_if_stopped=lambda: None)

    monkeypatch.setattr("rl_launch.commands.train.train", made_at_once)
    asked = read_plan("grpo-arithmetic", [f"policy.model_name={name}"])
    for _ in range(2):  # made once
        found = Path(with_local_models(asked).config.policy.model_name)
        assert len(made) == 1
        assert found.parent == tmp_path / "models"
        assert found.resolve() == made[0].resolve() / "checkpoints" / "step_400" / "hf"
    # of a later version of the package
    changed = read_plan(WARMED_UP[name], ["policy.max_grad_norm=7"])
    monkeypatch.setattr("rl_launch.commands.train.read_plan", lambda _: changed)
    assert Path(with_local_models(asked).config.policy.model_name) != found
    assert len(set(made)) == 2


def test_a_model_that_another_run_has_warmed_up_is_kept_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    for text in ("first", "second"):
        model = tmp_path / text
        model.mkdir()
        (model / "config.json").write_text(text)
        keep_warmed_up("tiny-arithmetic-sft", model)
    asked = read_plan("grpo-arithmetic", ["policy.model_name=tiny-arithmetic-sft"])
    found = Path(with_local_models(asked).config.policy.model_name)
    assert (found / "config.json").read_text() == "first"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [found.name]


def test_several_adapters_are_refused_before_anything_starts(tmp_path):
    plan = plan_of("policy.lora_cfg.enabled=true", "policy.lora_cfg.max_adapters=4")
    with pytest.raises(ConfigError, match=r"max_adapters=4: rl train trains one adapter"):
        train(plan, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
