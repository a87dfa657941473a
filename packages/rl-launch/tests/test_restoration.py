from dataclasses import dataclass

import pytest

from rl_core.errors import Origin, WorkerDied
from rl_launch.restoration import MOST_DEATHS, Restoration


@dataclass
class AtStep:
    saved: int
    has_begun: bool = True


def death(role="policy"):
    return WorkerDied("the process ended", Origin(role, 1, "here", "train_step"))


def test_a_death_in_a_step_goes_on_from_the_newest_checkpoint(caplog):
    restoration = Restoration(saves=True)
    restoration.judge(death(), AtStep(4))
    assert restoration.goes_on
    assert caplog.messages == [f"{death()}; starting again from checkpoint step_4"]


def test_a_death_before_the_first_checkpoint_begins_anew(caplog):
    restoration = Restoration(saves=True)
    restoration.judge(death(), AtStep(0))
    assert restoration.goes_on
    assert "from the beginning" in caplog.text


@pytest.mark.parametrize(
    ("saves", "error", "session"),
    [
        (False, death(), AtStep(4)),
        (True, death(), AtStep(0, has_begun=False)),
        (True, death("rollout worker"), AtStep(4)),
        (True, WorkerDied("of unknown origin"), AtStep(4)),
    ],
    ids=["saves nothing", "never began", "another role", "no origin"],
)
def test_what_is_not_gone_on_from(saves, error, session):
    restoration = Restoration(saves=saves)
    restoration.judge(error, session)
    assert not restoration.goes_on


def test_dying_again_at_the_same_place_fails_the_run():
    restoration = Restoration(saves=True)
    answers = []
    for saved in (4, 4, 8, *[8] * (MOST_DEATHS - 1)):
        restoration.judge(death(), AtStep(saved))
        answers.append(restoration.goes_on)
    assert answers == [True] * (len(answers) - 1) + [False]
