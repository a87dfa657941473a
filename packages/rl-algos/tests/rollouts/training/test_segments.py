"""Rollouts of several segments, as rows of a batch and as whole rollouts."""

import numpy as np
import pytest
from rollouts_builder import make_prompt, make_rollout, make_split_rollout

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import ESTIMATORS, advantages_of
from rl_algos.policy_gradient.advantages import by_rollout
from rl_algos.policy_gradient.objective import StepData, positive_examples
from rl_algos.rollouts.training.batch import build_batch, minibatches, shuffled_minibatches, with_advantages
from rl_algos.rollouts.training.metrics import rollout_metrics
from rl_algos.rollouts.training.rewards import repeated_share, trained_rewards
from rl_algos.rollouts.training.segments import ROLLOUT, rows_by_rollout
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout

PROMPT = make_prompt()
TURNS = [(4, 5), (6,), (7, 8, 9)]


def make_groups(*, split=True):
    """Two groups with rollouts of one to three turns, one of which failed; each a row, or a row per turn."""

    def played(reward, *turns, **kwargs):
        if split:
            return make_split_rollout(PROMPT, reward, *turns, **kwargs)
        return make_rollout(PROMPT, reward, tuple(token for turn in turns for token in turn), **kwargs)

    first = [played(1.0, *TURNS), make_rollout(PROMPT, 0.0), Rollout.failed(PROMPT, "hung")]
    second = [
        played(0.5, *TURNS[:2]),
        played(-1.0, *TURNS[1:], status="truncated"),
        make_rollout(PROMPT, 2.0, (3,) * 9),
    ]
    return [RolloutGroup.of(PROMPT, each) for each in (first, second)]


def config(**settings):
    return GRPOConfig(rewritten_history="split", max_rollout_turns=3, **settings)


def test_a_row_per_segment_knows_its_rollout():
    batch = build_batch(make_groups(), config())
    assert batch.array(ROLLOUT).tolist() == [0, 0, 0, 1, 2, 3, 3, 4, 4, 5]
    assert batch.lengths.tolist() == [5, 5, 7, 5, 3, 5, 5, 4, 7, 12]
    assert [rows.tolist() for rows in rows_by_rollout(batch)] == [[0, 1, 2], [3], [4], [5, 6], [7, 8], [9]]


def test_without_segments_no_batch_has_the_column():
    assert ROLLOUT not in build_batch(make_groups(split=False), GRPOConfig())


def test_segments_that_the_config_does_not_ask_for_are_refused():
    with pytest.raises(ConfigError, match=r"grpo.rewritten_history: .* set this key to `split`"):
        build_batch(make_groups(), GRPOConfig(rewritten_history="keep"))


def test_filtered_rollouts_train_in_none_of_their_segments():
    batch = build_batch(make_groups(), config(overlong_filtering=True))
    assert [int(mask.sum()) for mask in batch.ragged("loss_mask")] == [2, 1, 3, 2, 0, 2, 1, 0, 0, 9]


def test_minibatches_are_of_whole_rollouts():
    batch = build_batch(make_groups(), config())
    assert [part.array(ROLLOUT).tolist() for part in minibatches(batch, 4)] == [[0, 0, 0, 1, 2, 3, 3], [4, 4, 5]]
    passes = [part.array(ROLLOUT).tolist() for part in shuffled_minibatches(batch, 2, passes=2, seed=(1, 2))]
    assert len(passes) == 6
    for of_pass in (passes[:3], passes[3:]):
        in_order = [number for part in of_pass for number in part]
        assert sorted(in_order) == batch.array(ROLLOUT).tolist()
        # those of a rollout side by side
        assert sum(np.diff(in_order) != 0) == 5
        assert all(len(set(part)) == 2 for part in of_pass)
    assert passes[:3] != passes[3:]


WITH_SETTINGS = {"remax", "gdpo", "pass_at_k", "maxrl", "optimal_token_baseline", "tpo"}
"""Estimators that need more than rewards which may be negative."""


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - WITH_SETTINGS))
@pytest.mark.parametrize("with_penalties", [False, True])
def test_advantages_are_those_of_rollouts_of_one_row(name, with_penalties):
    found = []
    for split in (True, False):
        groups, settings = make_groups(split=split), config(adv_estimator={"name": name})
        batch = build_batch(groups, settings if split else GRPOConfig())
        mask = batch.ragged("loss_mask")
        penalties = np.zeros(len(mask.values))
        penalties[mask.values > 0] = np.linspace(0, 1, int(mask.values.sum()))
        advantages = advantages_of(groups, settings, penalties=mask.like(penalties) if with_penalties else None)
        trained = with_advantages(batch, advantages)
        column = trained["advantages"]
        by_token = column.values if isinstance(column, Ragged) else np.repeat(column, batch.lengths)
        assert len(column) == len(batch)
        found.append((by_token[mask.values > 0], by_rollout(advantages, groups)))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-12)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-12)
    assert len(found[0][1]) == 6


def test_the_optimal_baseline_weighs_all_tokens_of_a_rollout():
    found = []
    for split in (True, False):
        groups, settings = make_groups(split=split), config(adv_estimator={"name": "optimal_token_baseline"})
        batch = build_batch(groups, settings if split else GRPOConfig())
        mask = batch.ragged("loss_mask")
        columns = {}
        for name, sign in (("prev_logprobs", -1.0), ("prev_collision", 1.0)):
            values = np.zeros(len(mask.values))
            values[mask.values > 0] = sign * np.linspace(0.1, 0.9, int(mask.values.sum()))
            columns[name] = mask.like(values)
        advantages = advantages_of(groups, settings, batch=batch.with_columns(columns))
        found.append(advantages.values[mask.values > 0] if isinstance(advantages, Ragged) else advantages)
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)


def test_rewards_are_shaped_by_rollout():
    shaping = {"enabled": True, "repetition_penalty": 1.0, "repetition_ngram_size": 2, "max_response_length": 8}
    shaping |= {"overlong_buffer_length": 4, "length_penalty": 0.5}
    found, expected = (
        trained_rewards(make_groups(split=split), config(reward_shaping=shaping)) for split in (True, False)
    )
    np.testing.assert_array_equal(found, expected)
    # runs of tokens are found across segments
    repeating = make_split_rollout(PROMPT, 1.0, (4, 5, 6), (4, 5, 6))
    settings = config(reward_shaping={"enabled": True, "repetition_penalty": 1.0, "repetition_ngram_size": 2})
    assert trained_rewards([RolloutGroup.of(PROMPT, [repeating])], settings) == pytest.approx(
        1 - repeated_share(np.array([4, 5, 6, 4, 5, 6]), 2)
    )


def test_positive_examples_are_all_segments_of_a_rollout():
    groups = make_groups()
    batch = build_batch(groups, config())
    assert positive_examples(StepData(1, groups, batch)).tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 0, 1]


def test_metrics_count_rollouts_and_tell_the_segments():
    metrics, plain = (rollout_metrics(make_groups(split=split)) for split in (True, False))
    assert metrics.pop("rollout/segments") == pytest.approx((3 + 1 + 2 + 2 + 1) / 5)
    assert metrics == plain
