"""Advantages, batches and settings of plays with several agents."""

import dataclasses
import logging

import numpy as np
import pytest
from rollouts_builder import make_group, make_plays, make_prompt, make_rollout

from rl_algos.grpo.advantages import grpo, reinforce_plus_plus
from rl_algos.grpo.config import GRPOConfig, trained_agents
from rl_algos.grpo.estimators import advantages_of
from rl_algos.grpo.plugin import grpo_section
from rl_algos.rollouts.training.agents import AgentWatch, trained_batch
from rl_algos.rollouts.training.batch import build_batch, minibatches
from rl_algos.rollouts.training.metrics import rollout_metrics, signal_metrics
from rl_algos.rollouts.training.rewards import varies
from rl_core.config import ProblemError
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.rollouts.rollout import Rollout


def settings(**written) -> GRPOConfig:
    return grpo_section(written).model_validate(written)


def proposals() -> RolloutGroup:
    """Two plays of a proposer and two solvers; the problem of the second is harder."""
    return make_plays(
        "p0",
        [("proposer", "", 0.75), ("solver", "0", 1.0), ("solver", "0", 0.0)],
        [("proposer", "", 0.25), ("solver", "1", 0.0), ("solver", "1", 0.0)],
    )


def test_rollouts_are_compared_with_those_of_their_agent_and_peers():
    advantages = advantages_of([proposals()], GRPOConfig(normalize_rewards=False))
    assert advantages.tolist() == [0.25, 0.5, -0.5, -0.25, 0.0, 0.0]


def test_players_of_a_zero_sum_game_have_opposite_advantages():
    rewards = [1.0, -1.0, -1.0]
    group = make_plays("p0", *[[("first", "", each), ("second", "", -each)] for each in rewards])
    advantages = advantages_of([group], GRPOConfig())
    oracle = grpo(np.array(rewards), np.zeros(3, np.int64))
    np.testing.assert_array_equal(advantages[0::2], oracle)
    np.testing.assert_array_equal(advantages[1::2], -oracle)


def test_one_agent_has_the_advantages_of_an_unnamed_one():
    named = make_plays("p0", *[[("solver", "", each)] for each in (1.0, 0.0, 0.5)])
    config = GRPOConfig()
    np.testing.assert_array_equal(
        advantages_of([named], config), advantages_of([make_group("p0", [1.0, 0.0, 0.5])], config)
    )


def test_an_estimator_over_the_step_sees_the_rollouts_of_one_agent():
    config = settings(adv_estimator={"name": "reinforce_plus_plus"})
    advantages = advantages_of([proposals()], config)
    proposer, solver = np.array([0.75, 0.25]), np.array([1.0, 0.0, 0.0, 0.0])
    counts, mask = np.array([2, 2]), Ragged.from_rows([[1, 1]])
    np.testing.assert_array_equal(advantages[[0, 3]], reinforce_plus_plus(proposer, counts, mask, None))
    np.testing.assert_array_equal(advantages[[1, 2, 4, 5]], reinforce_plus_plus(solver, np.full(4, 2), mask, None))


def test_an_agent_may_have_an_estimator_and_a_weight_of_its_own():
    config = settings(
        normalize_rewards=False, agents={"proposer": {"adv_estimator": {"name": "reinforce"}, "weight": 0.5}}
    )
    assert advantages_of([proposals()], config).tolist() == [0.375, 0.5, -0.5, 0.125, 0.0, 0.0]


def test_weights_are_applied_after_clipping():
    config = settings(normalize_rewards=False, advantage_clip_high=0.1, agents={"solver": {"weight": 3.0}})
    np.testing.assert_allclose(advantages_of([proposals()], config), [0.1, 0.3, -1.5, -0.25, 0.0, 0.0])


def per_token(rewards, loss_mask):
    """An estimator by token: the reward at sampled tokens."""
    return loss_mask.like(np.repeat(rewards, loss_mask.lengths) * loss_mask.values)


def test_agents_by_token_and_by_rollout_are_joined_by_token(monkeypatch):
    monkeypatch.setitem(advantages_of.__globals__["ESTIMATORS"], "per_token", per_token)
    config = settings(normalize_rewards=False, agents={"proposer": {"adv_estimator": {"name": "per_token"}}})
    advantages = advantages_of([proposals()], config)
    assert isinstance(advantages, Ragged)
    assert [row.tolist() for row in advantages] == [
        [0.0, 0.0, 0.0, 0.75, 0.75],
        [0.5] * 5,
        [-0.5] * 5,
        [0.0, 0.0, 0.0, 0.25, 0.25],
        [0.0] * 5,
        [0.0] * 5,
    ]


def test_a_failed_play_counts_for_nothing():
    prompt = make_prompt("p0")
    rollouts = [
        dataclasses.replace(make_rollout(prompt, reward), agent=agent, play=number)
        for number, (agent, reward) in enumerate([("first", 1.0), ("first", 0.0)])
    ]
    failed = dataclasses.replace(Rollout.failed(prompt, "crashed"), play=2)
    group = RolloutGroup.of(prompt, [*rollouts, failed])
    config = settings(normalize_rewards=False, adv_estimator={"name": "gdpo"})
    with pytest.raises(ValueError, match="gdpo needs rewards by name"):
        advantages_of([group], config)
    assert advantages_of([group], GRPOConfig(normalize_rewards=False)).tolist() == [0.5, -0.5, 0.0]


def test_an_agent_that_does_not_train_leaves_the_loss():
    config = settings(agents={"proposer": {"train": False}})
    groups = [proposals()]
    batch = trained_batch(build_batch(groups, config), groups, trained_agents(config))
    assert batch.ragged(LOSS_MASK).sums().tolist() == [0, 2, 2, 0, 2, 2]
    assert advantages_of(groups, config)[[0, 3]].tolist() == [0.0, 0.0]


def test_a_minibatch_has_whole_plays():
    groups = [proposals(), make_plays("p1", [("proposer", "", 1.0)], [("proposer", "", 1.0), ("solver", "1", 1.0)])]
    batch = build_batch(groups, GRPOConfig())
    assert [len(part) for part in minibatches(batch, 2)] == [6, 3]
    assert [len(part) for part in minibatches(batch, 3)] == [7, 2]


def test_a_group_has_a_signal_if_rollouts_that_are_compared_differ():
    silent = make_plays("p0", [("first", "", 1.0), ("second", "", -1.0)], [("first", "", 1.0), ("second", "", -1.0)])
    assert not varies(silent)
    assert varies(proposals())
    assert signal_metrics([silent, proposals()], []) == {"rollout/groups_without_signal": 1.0}


def test_metrics_are_told_by_agent():
    metrics = rollout_metrics([proposals()])
    assert metrics["agent/proposer/reward"] == 0.5
    assert metrics["agent/solver/reward"] == 0.25
    assert metrics["agent/solver/rollouts"] == 4
    assert metrics["agent/solver/length"] == 2


def test_a_greedy_baseline_of_several_agents_is_refused():
    config = settings(adv_estimator={"name": "remax"})
    with pytest.raises(ValueError, match="one greedy rollout of each prompt"):
        advantages_of([proposals()], config, greedy=[proposals()])


def test_an_agent_that_does_not_occur_is_told_once(caplog):
    watch = AgentWatch("grpo", trained_agents(settings(agents={"propser": {"weight": 2.0}})))
    with caplog.at_level(logging.WARNING):
        watch.observe([proposals()])
        watch.observe([proposals()])
    assert [record.getMessage() for record in caplog.records] == [
        "grpo.agents.propser has no effect so far: the agents of this step are proposer, solver"
    ]


def test_the_name_of_an_agent_must_be_an_identifier():
    with pytest.raises(ProblemError, match="agents"):
        grpo_section({"agents": {"2nd": {}}})
