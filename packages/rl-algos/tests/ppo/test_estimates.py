"""From the rewards of a step to what policy and critic learn."""

import dataclasses

import numpy as np
import pytest
from gae_oracle import written_out
from rollouts_builder import make_prompt, make_rollout, make_split_rollout, make_turns

from rl_algos.ppo.config import PPOConfig, learning_agents
from rl_algos.ppo.estimates import CriticValues, estimates_of, value_metrics, values_of, with_returns
from rl_algos.ppo.plugin import ppo_section
from rl_algos.rollouts.training.agents import trained_batch
from rl_algos.rollouts.training.batch import build_batch
from rl_core.config import assemble, load, resolve
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigProblems
from rl_core.model import SCORES
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout
from rl_core.testing.fakes import FakeModel

PROMPT = make_prompt()


def make_step(seed=0, **settings):
    """Groups with a rollout that was cut off and one that failed, their batch and values at random."""
    ended = make_rollout(PROMPT, 1.0, sampled=(5, 6, 7))
    cut = make_rollout(PROMPT, 0.25, sampled=(8, 9), stop_reason="length", status="truncated")
    long = make_rollout(PROMPT, -1.0, sampled=tuple(range(30)))
    failed = Rollout.failed(PROMPT, "hung")
    groups = [RolloutGroup.of(PROMPT, (ended, cut)), RolloutGroup.of(PROMPT, (long, failed))]
    config = PPOConfig(**settings)
    batch = build_batch(groups, config)
    random = np.random.default_rng(seed)
    before = batch.ragged("tokens").like(random.normal(size=sum(batch.lengths)).astype(np.float32))
    return groups, config, batch, CriticValues(before, np.zeros(4))


def oracle(batch, values, gamma, lam, rewards, penalties=None):
    """Advantages by token, written out."""
    mask = batch.ragged("loss_mask")
    found = []
    for row, row_mask in enumerate(mask):
        by_token = np.zeros(len(row_mask)) if penalties is None else -penalties[row]
        if row_mask.any():
            by_token[np.flatnonzero(row_mask)[-1]] += rewards[row]
        of_row = lam[row] if np.ndim(lam) else lam
        found.append(written_out(by_token, values.before[row], row_mask, values.last[row], gamma, of_row))
    return np.concatenate(found)


REWARDS = [1.0, 0.25, -1.0, np.nan]


@pytest.mark.parametrize("bootstraps", [False, True])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_the_segments_of_a_rollout_follow_one_another_as_its_turns_do(bootstraps, alpha):
    turns = [(4, 5), (6,), (7, 8, 9)]

    class Valuing(FakeModel):
        """Values by place among the sampled tokens, and scores of rows by their last tokens."""

        def infer(self, batch, reads, **_):
            mask = batch.ragged("loss_mask")
            values = np.where(mask.values > 0, np.cos(mask.values.cumsum()), 99.0)
            scores = np.array([row[-1] / 10 for row in batch.ragged("tokens")])
            return Batch({"values": mask.like(values), "scores": scores})

    found = []
    for split in (True, False):
        settings = {"bootstrap_truncated": bootstraps, "length_adaptive_alpha": alpha, "gamma": 0.9, "gae_lambda": 0.8}
        config = PPOConfig(rewritten_history="split" if split else None, **settings)
        if split:
            cut = make_split_rollout(PROMPT, 0.25, *turns, status="truncated")
            ended = make_split_rollout(PROMPT, 1.0, *turns[:2])
        else:
            cut = make_rollout(PROMPT, 0.25, sum(turns, ()), status="truncated")
            ended = make_rollout(PROMPT, 1.0, sum(turns[:2], ()))
        groups = [RolloutGroup.of(PROMPT, (cut, ended)), RolloutGroup.of(PROMPT, (Rollout.failed(PROMPT, "hung"),))]
        batch = build_batch(groups, config)
        sampled = batch.ragged("loss_mask")
        penalties = np.where(sampled.values > 0, np.sin(sampled.values.cumsum()), 0.0)
        values = values_of(batch, groups, Valuing(), config)
        estimates = estimates_of(batch, groups, values, config, penalties=sampled.like(penalties))
        learned = with_returns(batch, values, estimates[1])
        assert learned.ragged("returns").lengths.tolist() == batch.lengths.tolist()
        found.append([learned.ragged(name).values[sampled.values > 0] for name in ("returns", "values")])
        found[-1].append(estimates[0].values[sampled.values > 0])
        found[-1].append(values.last)
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert found[0][3].any() == bootstraps


def test_the_policy_and_the_critic_have_lambdas_of_their_own():
    groups, config, batch, values = make_step(
        gamma=0.98, gae_lambda=0.7, critic_gae_lambda=1.0, normalize_advantages=False
    )
    estimates = estimates_of(batch, groups, values, config)
    np.testing.assert_allclose(estimates[0].values, oracle(batch, values, 0.98, 0.7, REWARDS), atol=1e-9)
    sampled = batch.ragged("loss_mask").values > 0
    returns = oracle(batch, values, 0.98, 1.0, REWARDS) + np.where(sampled, values.before.values, 0)
    np.testing.assert_allclose(estimates[1].values, returns, atol=1e-9)
    learned = with_returns(batch, values, estimates[1])
    assert learned.ragged("returns").values.dtype == learned.ragged("values").values.dtype == np.float32


def test_a_length_adaptive_lambda_is_that_of_each_rollout_and_the_critic_keeps_its_own():
    groups, config, batch, values = make_step(length_adaptive_alpha=0.5, gae_lambda=0.9, normalize_advantages=False)
    estimates = estimates_of(batch, groups, values, config)
    lam = [1 - 1 / 1.5, 0.0, 1 - 1 / 15, 0.0]
    np.testing.assert_allclose(estimates[0].values, oracle(batch, values, 1.0, lam, REWARDS), atol=1e-9)
    sampled = batch.ragged("loss_mask").values > 0
    returns = oracle(batch, values, 1.0, 0.9, REWARDS)[sampled] + values.before.values[sampled]
    np.testing.assert_allclose(estimates[1].values[sampled], returns, atol=1e-9)


def test_advantages_have_mean_0_and_deviation_1_over_the_sampled_tokens_of_the_step():
    groups, config, batch, values = make_step()
    unscaled = config.model_copy(update={"normalize_advantages": False})
    plain = estimates_of(batch, groups, values, unscaled)[0].values
    sampled = batch.ragged("loss_mask").values > 0
    expected = (plain[sampled] - plain[sampled].mean()) / plain[sampled].std()
    found = estimates_of(batch, groups, values, config)[0].values
    np.testing.assert_allclose(found[sampled], expected, rtol=1e-6)
    assert not found[~sampled].any()
    clipped = config.model_copy(update={"advantage_clip_high": 0.5})
    assert estimates_of(batch, groups, values, clipped)[0].values.max() == 0.5


def test_penalties_are_taken_from_the_reward_of_each_token():
    groups, config, batch, values = make_step(normalize_advantages=False)
    penalties = batch.ragged("tokens").like(np.linspace(0, 1, sum(batch.lengths)))
    found = estimates_of(batch, groups, values, config, penalties=penalties)[0].values
    np.testing.assert_allclose(found, oracle(batch, values, 1.0, 0.95, REWARDS, penalties), atol=1e-9)


@pytest.mark.parametrize("bootstraps", [False, True])
def test_each_turn_may_have_its_own_reward(bootstraps):
    rollouts = (
        make_turns(PROMPT, [0.5, 0.0, 2.0], late=-1.0),
        make_rollout(PROMPT, 0.25),
        Rollout.failed(PROMPT, "hung"),
    )
    groups = [RolloutGroup.of(PROMPT, rollouts)]
    config = PPOConfig(rewards_by_turn=True, normalize_advantages=False, gamma=0.9, gae_lambda=0.8)
    mask = build_batch(groups, config).ragged("loss_mask")
    values = mask.like(np.random.default_rng(1).normal(size=len(mask.values)).astype(np.float32))
    last = np.array([0.7, 0.0, 0.0]) if bootstraps else np.zeros(3)
    advantages, _ = estimates_of(build_batch(groups, config), groups, CriticValues(values, last), config)
    by_turn = np.zeros(len(mask[0]))
    by_turn[np.flatnonzero(mask[0])[[1, 3, 5]]] = 0.5, 0.0, 1.0
    np.testing.assert_allclose(advantages[0], written_out(by_turn, values[0], mask[0], last[0], 0.9, 0.8), atol=1e-12)
    single = np.zeros(len(mask[1]))
    single[np.flatnonzero(mask[1])[-1]] = 0.25
    np.testing.assert_allclose(advantages[1], written_out(single, values[1], mask[1], 0.0, 0.9, 0.8), atol=1e-12)
    assert not advantages[2].any()


def test_a_rollout_that_was_cut_off_ends_with_the_critics_value_of_its_last_state_if_asked_for():
    groups, config, batch, _ = make_step(bootstrap_truncated=True)
    critic = FakeModel()
    values = values_of(batch, groups, critic, config)
    scores = critic.infer(batch, [SCORES]).array("scores")
    assert values.last.tolist() == [0.0, scores[1], 0.0, 0.0]
    assert scores[1] != 0
    plain = values_of(batch, groups, critic, config.model_copy(update={"bootstrap_truncated": False}))
    assert not plain.last.any()
    assert plain.before.equals(values.before)


def test_filtered_rollouts_teach_neither_policy_nor_critic():
    groups, config, batch, values = make_step(overlong_filtering=True, normalize_advantages=False)
    estimates = estimates_of(batch, groups, values, config)
    assert not estimates[0][1].any()
    assert not estimates[1][1].any()
    assert batch.ragged("loss_mask").sums().tolist() == [3, 0, 30, 0]


def test_the_explained_variance_is_1_for_perfect_values_and_0_for_constant_ones():
    groups, config, batch, values = make_step(gae_lambda=1.0)
    estimates = estimates_of(batch, groups, values, config)
    perfect = CriticValues(estimates[1], values.last)
    assert value_metrics(batch, perfect, estimates[1])["critic/explained_variance"] == pytest.approx(1.0)
    constant = CriticValues(Ragged(np.full(len(estimates[1].values), 0.3), estimates[1].offsets), values.last)
    found = value_metrics(batch, constant, estimates[1])
    assert found["critic/explained_variance"] == pytest.approx(0.0)
    assert found["critic/value_mean"] == pytest.approx(0.3)
    sampled = batch.ragged("loss_mask").values > 0
    assert found["critic/return_mean"] == pytest.approx(estimates[1].values[sampled].mean())


def play_groups():
    """Plays of two agents whose rewards have other scales, and a play that failed."""
    random = np.random.default_rng(3)
    groups = []
    for _ in range(3):
        rollouts = []
        for play in range(2):
            for agent, scale in (("first", 1.0), ("second", 10.0)):
                sampled = tuple(range(5, 6 + int(random.integers(1, 6))))
                rollout = make_rollout(PROMPT, scale * float(random.normal()), sampled=sampled)
                rollouts.append(dataclasses.replace(rollout, agent=agent, play=play))
        groups.append(RolloutGroup.of(PROMPT, [*rollouts, dataclasses.replace(Rollout.failed(PROMPT, "hung"), play=2)]))
    return groups


def with_values(groups, config):
    batch = trained_batch(build_batch(groups, config), groups, learning_agents(config))
    before = batch.ragged("tokens")
    return batch, CriticValues(before.like(np.sin(np.arange(len(before.values)))), np.zeros(len(before)))


def ppo(**written) -> PPOConfig:
    return ppo_section(written).model_validate(written)


def test_each_agent_has_the_estimates_of_a_run_of_its_own():
    groups, config = play_groups(), ppo(agents={"second": {"weight": 0.5}}, advantage_clip_high=1.0)
    batch, values = with_values(groups, config)
    advantages, returns = estimates_of(batch, groups, values, config)
    agents = np.array([agent for group in groups for agent in group.rollouts.agents])
    for agent, weight in (("first", 1.0), ("second", 0.5)):
        rows = np.flatnonzero(agents == agent)
        own = [
            dataclasses.replace(group, rollouts=group.rollouts.select(places), columns=group.columns.select(places))
            for group in groups
            if (places := np.flatnonzero(np.array(group.rollouts.agents) == agent)) is not None
        ]
        alone = CriticValues(values.before.select(rows), np.zeros(len(rows)))
        expected = estimates_of(build_batch(own, PPOConfig()), own, alone, PPOConfig(advantage_clip_high=1.0))
        np.testing.assert_allclose(advantages.select(rows).values, weight * expected[0].values, rtol=1e-12)
        np.testing.assert_array_equal(returns.select(rows).values, expected[1].values)
    together = estimates_of(
        batch,
        [dataclasses.replace(g, rollouts=dataclasses.replace(g.rollouts, agent=())) for g in groups],
        values,
        PPOConfig(advantage_clip_high=1.0),
    )
    assert not np.allclose(together[0].values, advantages.values)


def test_an_agent_that_does_not_train_teaches_neither_policy_nor_critic():
    groups = play_groups()
    config = ppo(agents={"second": {"train": False}})
    batch, values = with_values(groups, config)
    advantages, returns = estimates_of(batch, groups, values, config)
    agents = np.array([agent for group in groups for agent in group.rollouts.agents])
    mask = batch.ragged("loss_mask")
    assert not mask.select(np.flatnonzero(agents == "second")).values.any()
    whole, its_values = with_values(groups, ppo())
    everyone = estimates_of(whole, groups, its_values, ppo())
    rows = np.flatnonzero(agents == "first")
    np.testing.assert_array_equal(advantages.select(rows).values, everyone[0].select(rows).values)
    np.testing.assert_array_equal(returns.select(rows).values, everyone[1].select(rows).values)


def test_rewards_of_turns_belong_to_their_rollouts_also_beside_some_that_do_not_train():
    """A rollout that is filtered has no sampled tokens in the batch, but its turns have some."""
    cut = dataclasses.replace(make_turns(PROMPT, [1.0, 2.0]), stop_reason="length", status="truncated")
    groups = [RolloutGroup.of(PROMPT, [cut, make_turns(PROMPT, [0.5, 0.0, 1.0])])]
    settings = {"rewards_by_turn": True, "normalize_advantages": False, "max_rollout_turns": 3}
    filtered = PPOConfig(**settings, overlong_filtering=True)
    (batch, values), (all_rows, _) = with_values(groups, filtered), with_values(groups, PPOConfig(**settings))
    assert not batch.ragged("loss_mask")[0].any()
    found = estimates_of(batch, groups, values, filtered)
    expected = estimates_of(all_rows, groups, values, PPOConfig(**settings))
    np.testing.assert_array_equal(found[0][1], expected[0][1])
    assert not found[0][0].any()


@pytest.mark.parametrize("key", ["adv_estimator", "opponent"])
def test_settings_of_agents_that_only_grpo_has_are_refused_by_name(key):
    written = {"agents": {"first": {key: "grpo"}}}
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"ppo": written}), assemble("Root", {"ppo": ppo_section(written)}))
    [problem] = refused.value.problems
    assert problem.key == f"ppo.agents.first.{key}"
    assert "GRPO" in problem.reason
    assert "algorithm: grpo" in problem.reason
