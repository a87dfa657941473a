from dataclasses import dataclass

import pytest

from rl_core.errors import ConfigError, FailureOrigin, GeneratorError, WorkerDied
from rl_launch.placement.bundles import DevicesLost, PlacementError
from rl_launch.runtime.restoration import MAX_DEATHS, Restoration


@dataclass
class AtStep:
    saved: int
    has_begun: bool = True


def death(role="policy"):
    return WorkerDied("the process ended", FailureOrigin(role, 1, "here", "train_step"))


def no_node():
    return []


def a_node():
    return ["10.0.0.2"]


def test_a_death_in_a_step_goes_on_from_the_newest_checkpoint(caplog):
    restoration = Restoration(saves=True)
    restoration.judge(death(), AtStep(4), no_node)
    assert restoration.goes_on
    assert caplog.messages == [f"{death()}; restarting from checkpoint step_4"]


def test_a_death_before_the_first_checkpoint_begins_anew(caplog):
    restoration = Restoration(saves=True)
    restoration.judge(death(), AtStep(0), no_node)
    assert restoration.goes_on
    assert "from the beginning" in caplog.text


def test_a_run_that_has_waited_for_devices_is_not_gone_on_from():
    restoration = Restoration(saves=True)
    restoration.judge(DevicesLost("no replica is left"), AtStep(4), a_node)
    assert not restoration.goes_on


@pytest.mark.parametrize(
    ("saves", "error", "session"),
    [
        (False, death(), AtStep(4)),
        (True, death(), AtStep(0, has_begun=False)),
        (True, death("rollout worker"), AtStep(4)),
        (True, GeneratorError("the engine is dead"), AtStep(4)),
    ],
    ids=["saves nothing", "never began", "replaced by others", "no process died"],
)
def test_what_is_not_gone_on_from(saves, error, session):
    restoration = Restoration(saves=saves)
    restoration.judge(error, session, no_node)
    assert not restoration.goes_on


def test_dying_again_at_the_same_place_fails_the_run():
    restoration = Restoration(saves=True)
    answers = []
    for saved in (4, 4, 8, *[8] * (MAX_DEATHS - 1)):
        restoration.judge(death(), AtStep(saved), no_node)
        answers.append(restoration.goes_on)
    assert answers == [True] * (len(answers) - 1) + [False]


@pytest.mark.parametrize("error", [death(), death("rollout worker"), death("environment math"), GeneratorError("gone")])
def test_whatever_the_loss_of_a_node_looks_like_is_gone_on_from(error, caplog):
    restoration = Restoration(saves=True)
    restoration.judge(error, AtStep(4), a_node)
    assert restoration.goes_on
    assert caplog.messages == [f"node 10.0.0.2 was lost ({error}); restarting from checkpoint step_4"]


def test_a_node_that_is_lost_while_a_run_is_being_restored_is_gone_on_from():
    restoration = Restoration(saves=True)
    restoration.judge(death(), AtStep(4), no_node)
    restoration.judge(WorkerDied("node 10.0.0.2 was lost"), AtStep(4, has_begun=False), a_node)
    assert restoration.goes_on


def test_a_users_mistake_is_not_gone_on_from_even_if_a_node_is_lost():
    restoration = Restoration(saves=True)
    restoration.judge(ConfigError("wrong"), AtStep(4), a_node)
    assert not restoration.goes_on


def test_a_run_that_does_not_fit_on_what_is_left_ends_with_one_message():
    restoration = Restoration(saves=True)
    error = PlacementError("too few GPUs.")
    assert restoration.failed(error) is error
    restoration.judge(death("rollout worker"), AtStep(4), a_node)
    assert isinstance(restoration.failed(error), DevicesLost)
    assert str(restoration.failed(error)) == (
        f"node 10.0.0.2 was lost ({death('rollout worker')}); the run could not be restored: too few GPUs. Run the "
        "same command to resume it when the cluster has the devices."
    )
