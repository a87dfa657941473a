"""Gradients of advantages by teachers: in closed form, and added to those of rewards."""

import numpy as np
import pytest
from loss_cases import LENGTHS, SEQUENCE_MEAN, loss_and_gradients, make_batch

from rl_algos.grpo.config import GRPOConfig, TeacherAdvantageConfig
from rl_algos.grpo.teacher_advantages import with_teachers
from rl_algos.losses.distillation import TEACHER_TOKEN_LOGPROBS
from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.surrogates import CISPO, Reinforce
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged


class Known:
    """A teacher whose logprobs are known."""

    metrics = {}

    def __init__(self, logprobs):
        self._logprobs = logprobs

    def scored(self, batch, groups):
        return batch.with_columns({TEACHER_TOKEN_LOGPROBS: batch.ragged("tokens").like(self._logprobs)})


def taught(advantages, batch, teacher, **settings):
    config = GRPOConfig(distillation=TeacherAdvantageConfig(**settings))
    return with_teachers(advantages, batch, [], teacher, config)


def test_the_gradient_is_that_of_the_reverse_kl_divergence_also_for_tokens_that_older_weights_sampled():
    generator = np.random.default_rng(5)
    policy, teacher = (np.log(generator.dirichlet(np.ones(5))) for _ in range(2))
    counts = np.array([4, 1, 7, 2, 6])  # Each token as often as the older weights sample it.
    sampled = np.repeat(np.arange(5), counts)
    n = len(sampled)

    def column(values):
        return Ragged.from_rows([np.array([0.0, value]) for value in values], np.float64)

    batch = Batch(
        {
            "tokens": Ragged.from_rows([np.array([0, token]) for token in sampled], np.int32),
            "loss_mask": Ragged.from_rows([np.array([0, 1])] * n, np.uint8),
            "logprobs": column(policy[sampled]),
            "entropy": column(np.zeros(n)),
            "prev_logprobs": column(policy[sampled]),
            "generation_logprobs": column(np.log(counts / n)[sampled]),
        }
    )
    known = Known(column(teacher[sampled]).values)
    found = taught(np.zeros(n), batch, known, weight=1.0, reward_weight=0.0)
    loss = PolicyLoss(Reinforce(), importance=ImportanceCorrection())
    trained = batch.with_columns({"advantages": found.advantages})
    by_token = loss_and_gradients(loss, trained, [range(n)])[1]["logprobs"].reshape(n, 2)[:, 1]
    p = np.exp(policy)
    by_logit = np.bincount(sampled, by_token, 5) - p * by_token.sum()
    divergence = (p * (policy - teacher)).sum()
    np.testing.assert_allclose(by_logit, p * (policy - teacher - divergence), rtol=1e-9)
    assert found.metrics["teacher/kl"] == pytest.approx((counts / n * (policy - teacher)).sum())


@pytest.mark.parametrize("parts", [[range(5)], [[3], [0, 4], [2], [1]]], ids=["whole", "split"])
@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(Reinforce()),
        PolicyLoss(CISPO(clip_low=1.0, clip_high=0.3)),
        PolicyLoss(on_policy=True),
        PolicyLoss(Reinforce(), SEQUENCE_MEAN, importance=ImportanceCorrection(high=1.1)),
    ],
    ids=["reinforce", "cispo", "one update", "weights"],
)
def test_the_gradient_of_the_mixed_loss_is_the_sum_of_the_gradients_of_both(loss, parts):
    batch = make_batch(7)
    rewards = batch["advantages"].astype(np.float64)
    teacher = Known(np.random.default_rng(3).normal(size=sum(LENGTHS)) - 2)

    def gradient(advantages):
        return loss_and_gradients(loss, batch.with_columns({"advantages": advantages}), parts)[1]["logprobs"]

    mixed = taught(rewards, batch, teacher, weight=0.3, reward_weight=0.7).advantages
    only = taught(rewards, batch, teacher, weight=1.0, reward_weight=0.0).advantages
    np.testing.assert_allclose(gradient(mixed), 0.7 * gradient(rewards) + 0.3 * gradient(only), rtol=1e-9, atol=1e-14)


def test_advantages_of_tokens_are_kept_and_teachers_are_bounded_and_ignored_in_demonstrations():
    batch = make_batch(7)
    mask = batch.ragged("loss_mask")
    rewards = mask.like(np.arange(sum(LENGTHS), dtype=np.float64))
    teacher = Known(np.full(sum(LENGTHS), -5.0))
    config = GRPOConfig(advantage_clip_low=-0.5, advantage_clip_high=0.5)
    found = with_teachers(rewards, batch, [], teacher, config).advantages
    prev = batch.ragged("prev_logprobs")
    for row in range(5):
        bounded = np.clip(-5.0 - prev[row], -0.5, 0.5)
        expected = np.where((mask[row] > 0) & (not batch["demonstration"][row]), bounded, 0.0)
        np.testing.assert_allclose(found[row], rewards[row] + expected)
