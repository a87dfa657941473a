import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Annotated

import counting_run as counting
import pytest
from rich.console import Console

from rl_core.config import WhenChanged
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.run_session import RunSession, newest_checkpoint
from rl_launch.run_session.directory.branch import Branch, BranchPoint
from rl_launch.run_session.directory.recording import WholeConfig
from rl_launch.run_session.directory.run_folder import RunFolder


class LoopConfig(counting.LoopConfig):
    seed: int = 7
    depth: Annotated[int, WhenChanged.NEW_RUN] = 2


class Config(counting.CountingConfig):
    loop: LoopConfig = LoopConfig()


def config(max_num_steps=6, **loop):
    return Config(loop=LoopConfig(max_num_steps=max_num_steps, **loop))


def branch(text, settings):
    return BranchPoint.parse(str(text)).branch(settings, WholeConfig())


def run_branch(run_dir, settings, start=None, *, at_step=lambda step: None):
    """The values of a branch's steps, which follow from the weights that it starts from and its draws."""
    model, draws, values = counting.CountingModel(), counting.Draws(), {}
    with RunSession(run_dir, settings, branch=start, console=Console(file=open(os.devnull, "w"))) as session:
        steps = session.steps(settings.loop.max_num_steps, models={"policy": model}, state={"draws": draws})
        for step in steps:
            values[step] = model.train(draws.draw())
            session.record(step, {"train/loss": values[step]})
            at_step(step)
    return values


@pytest.fixture
def origin(tmp_path):
    run_branch(tmp_path / "origin", config())
    return tmp_path / "origin"


def losses(run_dir):
    return {row["step"]: row["train/loss"] for row in counting.metrics(run_dir)}


def test_a_branch_goes_on_from_the_step_as_the_run_itself_did(tmp_path, origin):
    start = branch(f"{origin}:4", config(learning_rate=0.2))
    values = run_branch(tmp_path / "branch", config(learning_rate=0.2), start)
    whole = losses(origin)
    assert values == {5: whole[5], 6: whole[6]}
    assert losses(tmp_path / "branch") == values
    assert newest_checkpoint(tmp_path / "branch").name == "step_6"
    assert losses(origin) == whole


def test_a_branch_says_where_it_started_and_what_it_changed(tmp_path, origin):
    settings = config(8, learning_rate=0.2).model_copy(update={"run_dir": str(tmp_path / "branch")})
    run_branch(tmp_path / "branch", settings, branch(origin, settings))
    assert RunFolder(tmp_path / "branch").description().origin == {
        "run_dir": str(origin),
        "step": 6,
        "checkpoint": f"{origin}/checkpoints/step_6",
        "changed": ["loop.max_num_steps: 6 -> 8", "loop.learning_rate: 0.1 -> 0.2"],
        "keeps_position": True,
    }


def test_a_branch_with_another_seed_begins_at_the_start_of_the_data(tmp_path, origin):
    settings = config(seed=8)
    start = branch(f"{origin}:4", settings)
    values = run_branch(tmp_path / "branch", settings, start)
    first_draw = losses(origin)[1]
    assert values[5] == losses(origin)[4] * 1.5 + first_draw
    assert not start.keeps_position


def test_a_branch_resumes_from_its_own_checkpoint_and_before_that_from_where_it_started(tmp_path, origin):
    settings = config(20)

    def stop(at):
        return lambda step: step == at and os.kill(os.getpid(), signal.SIGINT)

    def fail(step):
        raise RuntimeError("lost")

    whole = run_branch(tmp_path / "whole", settings, branch(origin, settings))
    with pytest.raises(RuntimeError):
        run_branch(tmp_path / "cut", settings, branch(origin, settings), at_step=fail)
    assert not list((tmp_path / "cut/checkpoints").iterdir())
    first = run_branch(tmp_path / "cut", settings, at_step=stop(9))
    second = run_branch(tmp_path / "cut", settings)
    assert first | second == whole
    assert next(iter(second)) == 10


def test_a_branch_whose_start_is_gone_is_refused_until_it_has_a_checkpoint_of_its_own(tmp_path, origin):
    settings = config(20)
    start = branch(origin, settings)
    shutil.rmtree(start.checkpoint)
    with pytest.raises(RunDirectoryError, match=r"step_6, from which this run branches, no longer exists"):
        run_branch(tmp_path / "branch", settings, start)


def test_a_damaged_start_is_named(tmp_path, origin):
    start = branch(origin, config(20))
    weights = start.checkpoint / "policy/weights.npy"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    with pytest.raises(RunDirectoryError, match=r"cannot branch: .*other contents"):
        run_branch(tmp_path / "branch", config(20), start)


@pytest.mark.parametrize("form", ["{run}:4", "{run}:step_4", "{run}/checkpoints/step_4", "{run}/checkpoints/step_4/"])
def test_a_step_is_named_in_several_ways(origin, form):
    point = BranchPoint.parse(form.format(run=origin))
    assert (point.run.path, point.name.step) == (origin, 4)


def test_a_start_is_relative_to_the_current_folder(origin, monkeypatch):
    monkeypatch.chdir(origin.parent)
    assert branch("origin:4", config(20)) == branch(f"{origin}:4", config(20))
    monkeypatch.chdir(origin / "checkpoints")
    assert branch("step_4", config(20)) == branch(f"{origin}:4", config(20))


def test_what_cannot_be_branched_from_is_refused(tmp_path, origin):
    with pytest.raises(RunDirectoryError, match="has no checkpoint of step 3; it has step_2, step_4, step_6"):
        branch(f"{origin}:3", config(20))
    with pytest.raises(RunDirectoryError, match=f" {tmp_path}/nowhere"):
        branch(tmp_path / "nowhere", config(20))
    with pytest.raises(ConfigError, match=r"cannot change .*\n  needs a new run  loop.depth: 2 -> 3\n.*\n.*step_6/hf"):
        branch(origin, config(20, depth=3))
    with pytest.raises(ConfigError, match=r"loop.max_num_steps: got 6, .* step 6 .*=12"):
        branch(origin, config())


def test_a_branch_is_named_again_by_its_run(tmp_path, origin):
    known = branch(f"{origin}:4", config())
    assert BranchPoint.parse(str(origin)).is_of(known)
    assert BranchPoint.parse(f"{origin}:4").is_of(known)
    assert not BranchPoint.parse(f"{origin}:2").is_of(known)
    assert Branch.from_json(json.loads(json.dumps(known.as_json()))) == known


def test_a_run_that_goes_on_may_be_branched_from(tmp_path):
    process = subprocess.Popen(
        [sys.executable, counting.__file__, str(tmp_path / "origin"), "0", "never"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "3":
        pass
    try:
        assert BranchPoint.parse(str(tmp_path / "origin")).branch(counting.config(20), WholeConfig()).step == 2
    finally:
        process.terminate()
        process.communicate(timeout=60)
