import shlex
from pathlib import Path
from typing import Annotated, Any

import pytest

from rl_core.config import Config, WhenChanged, as_written, changed_keys, load, resolve
from rl_launch.run_session.directory.remedies import command_to_go_on, finished, refusal, train_command
from rl_launch.run_session.directory.run_state import RunState

CHECKPOINT = Path("runs/a/checkpoints/step_20")


class Loop(Config):
    max_num_steps: Annotated[int | None, WhenChanged.GOAL] = 10
    max_num_epochs: Annotated[int | None, WhenChanged.GOAL] = None
    stop_at_loss: Annotated[float | None, WhenChanged.GOAL] = None
    rate: float = 0.1
    settings: dict[str, Any] = {"lr": 0.1, "decay": 0.5}


class Root(Config):
    model: Annotated[str, WhenChanged.NEW_RUN] = "tiny"
    period: Annotated[int, WhenChanged.RESUME] = 5
    loop: Loop = Loop()


def config(**loop):
    return Root(loop=Loop(**loop))


def changed(**written):
    new = as_written(resolve(load(written), Root).config)
    return changed_keys(Root, as_written(Root()), new), new


def test_what_may_change_is_not_refused():
    assert refusal("runs/a", *changed(period=7, loop={"max_num_steps": 20}), CHECKPOINT) == ""


def test_a_refusal_lists_every_difference_and_the_command_for_each_way_on():
    assert refusal("runs/a", *changed(period=7, loop={"rate": 0.2}), CHECKPOINT).splitlines() == [
        "runs/a contains a run with another config:",
        "  needs a branch  loop.rate: 0.1 -> 0.2",
        "  may change      period: 5 -> 7",
        "To resume the run with its config:",
        "  rl train runs/a period=7",
        "To branch from step_20 with the new values, optimizer state included:",
        "  rl train --from runs/a period=7 loop.rate=0.2",
    ]


def test_what_a_checkpoint_cannot_hold_needs_a_new_run():
    said = refusal("runs/a", *changed(model="large", loop={"rate": 0.2}), CHECKPOINT)
    assert 'needs a new run  model: "tiny" -> "large"' in said
    assert "policy.model_name=runs/a/checkpoints/step_20/hf" in said
    assert "--from" not in said


def test_without_a_checkpoint_nothing_is_offered_to_branch_from():
    said = refusal("runs/a", *changed(loop={"rate": 0.2}), None)
    assert "no checkpoint to branch from. Choose another run_dir" in said


@pytest.mark.parametrize(
    "loop",
    [
        {"rate": 1e-05, "max_num_steps": None},
        {"settings": {"lr": 0.1}},
        {"settings": {"lr": 0.1, "decay": 0.5, "betas": [0.9, 0.95], "name": "a b"}},
    ],
)
def test_the_command_gives_the_config_that_was_refused(loop):
    changes, new = changed(loop=loop)
    words = shlex.split(train_command("runs/a", changes, new, branches=True))
    assert words[:4] == ["rl", "train", "--from", "runs/a"]
    assert as_written(resolve(load(as_written(Root()), words[4:]), Root).config) == new


def ended(reason="", *, step=10, max_steps=10, **goals):
    keys = {"loop.max_num_steps": 10, "loop.max_num_epochs": None, "loop.stop_at_loss": None}
    return RunState(
        "finished", step, max_steps, reason, keys | {f"loop.{name}": value for name, value in goals.items()}
    )


def test_a_run_that_made_its_steps_is_finished_until_they_are_raised():
    assert finished("runs/a", ended(), 10, config(), saves=True) == (
        "runs/a: finished at step 10 of 10. To continue, increase loop.max_num_steps: rl train runs/a "
        "loop.max_num_steps=20"
    )
    assert finished("runs/a", ended(), 10, config(max_num_steps=20), saves=True) == ""


def test_a_run_with_fewer_steps_than_it_made_is_finished():
    said = finished("runs/a", ended(), 10, config(max_num_steps=6), saves=True)
    assert said.startswith("runs/a: finished at step 10 of 6.")


def test_a_run_that_met_its_goal_is_finished_until_the_goal_changes():
    state = ended("loss is 0.1, the goal was 0.2", step=4, stop_at_loss=0.2)
    said = finished("runs/a", state, 4, config(stop_at_loss=0.2), saves=True)
    assert said.startswith(
        "runs/a: finished at step 4 of 10 (loss is 0.1, the goal was 0.2). To continue, change loop.stop"
    )
    assert finished("runs/a", state, 4, config(stop_at_loss=0.01), saves=True) == ""


def test_a_run_that_was_killed_after_its_last_save_is_finished():
    state = RunState("interrupted", 10, 10)
    assert finished("runs/a", state, 10, config(), saves=True)
    assert finished("runs/a", state, 8, config(), saves=True) == ""


def test_a_finished_run_whose_last_checkpoint_is_gone_goes_on_from_the_one_before():
    assert finished("runs/a", ended(), 8, config(), saves=True) == ""
    assert finished("runs/a", ended(), None, config(), saves=False)


def test_a_run_that_its_epochs_ended_is_told_to_raise_those():
    state = ended(step=7, max_steps=7, max_num_epochs=1)
    said = finished("runs/a", state, 7, config(max_num_epochs=1), saves=True)
    assert said.endswith("increase loop.max_num_epochs: rl train runs/a loop.max_num_epochs=2")


def test_a_run_whose_steps_nothing_bounds_is_told_to_set_them():
    state = ended(step=7, max_steps=7, max_num_steps=None)
    said = finished("runs/a", state, 7, config(max_num_steps=None), saves=True)
    assert said.endswith("increase loop.max_num_steps: rl train runs/a loop.max_num_steps=14")


def test_a_run_that_has_not_finished_goes_on_as_it_is():
    assert command_to_go_on("my runs/a", RunState("failed", 3)) == "rl train 'my runs/a'"
    assert command_to_go_on("a", RunState("running", 3)) == ""
