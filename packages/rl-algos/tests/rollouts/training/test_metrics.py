"""What a step reports of its rollouts."""

import pytest
from rollouts_builder import make_group, make_prompt, make_rollout

from rl_algos.rollouts.training.metrics import signal_metrics
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout


def group_with_failures(*rewards):
    """A rollout for each reward; None is a failed one."""
    prompt = make_prompt("f")
    made = [Rollout.failed(prompt, "why") if each is None else make_rollout(prompt, each) for each in rewards]
    return RolloutGroup.of(prompt, made)


@pytest.mark.parametrize(
    ("group", "is_alike"),
    [
        # the deviation of three times 0.1 rounds to more than 0
        (make_group("a", [0.1, 0.1, 0.1]), True),
        (make_group("a", [1.0]), True),
        (make_group("a", [0.0, 1e-300]), False),
        (group_with_failures(0.5, None, 0.5), True),
        (group_with_failures(0.5, None, 1.0), False),
        (group_with_failures(None, None), False),
    ],
)
def test_groups_without_signal_are_those_whose_rewards_are_all_equal(group, is_alike):
    groups = [make_group("b", [0.0, 1.0]), group, make_group("c", [1.0, 0.0])]
    metrics = signal_metrics(groups, [make_group("d", [1.0, 1.0])])
    assert metrics["rollout/groups_without_signal"] == 1 + is_alike
