"""Metrics of rollouts that older weights sampled."""

import dataclasses

import pytest
from rollouts_builder import make_prompt, make_rollout

from rl_algos.rollouts.driver.source import staleness_metrics
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout, WeightSpan


def group_of(*spans):
    """A group of a rollout for each list of (version, number of tokens)."""
    prompt = make_prompt()
    rollouts = []
    for each in spans:
        sampled = tuple(range(sum(number for _, number in each)))
        rollout = make_rollout(prompt, 1.0, sampled=sampled)
        rollouts.append(dataclasses.replace(rollout, spans=tuple(WeightSpan(*span) for span in each)))
    return RolloutGroup.of(prompt, rollouts)


def test_ages_are_weighed_by_tokens():
    groups = [group_of([(5, 3)], [(3, 1), (4, 2)]), group_of([(4, 4)])]
    assert staleness_metrics(groups, 5, max_staleness=2) == {
        "staleness/mean": pytest.approx((2 * 1 + 1 * 2 + 1 * 4) / 10),
        "staleness/max": 2,
        "staleness/several_versions": pytest.approx(1 / 3),
        "staleness/share_0": pytest.approx(0.3),
        "staleness/share_1": pytest.approx(0.6),
        "staleness/share_2": pytest.approx(0.1),
    }


def test_rollouts_that_sampled_nothing_have_no_age():
    prompt = make_prompt()
    failed = RolloutGroup.of(prompt, [Rollout.failed(prompt, "no engine")])
    assert staleness_metrics([failed], 3, max_staleness=1) == {}
    assert staleness_metrics([failed, group_of([(3, 2)])], 3, max_staleness=0)["staleness/share_0"] == 1
