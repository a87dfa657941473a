"""What is computed once a step for a loss, beside the loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
from rollouts_builder import make_group

from rl_algos.grpo.config import GRPOConfig
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.surrogates import ClipCov, KLCov
from rl_algos.losses.terms import EntropyBonus, KLPenalty, StalenessDecay
from rl_algos.policy_gradient.objective import (
    AdaptiveEntropy,
    AdaptiveKL,
    Objective,
    StepData,
    high_covariance,
    high_entropy,
    kl_estimates,
    positive_examples,
    small_moment,
    with_logprobs,
)
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_core.errors import LogprobsDiffer
from rl_core.metrics import Metric
from rl_core.model import LOGPROBS
from rl_core.testing.fakes import FakeModel, FakeWeights
from rl_core.token_filter import TokenFilter

GROUPS = [make_group("a", [1.0, 0.0, -0.5]), make_group("b", [0.5, 2.0])]


def step_data() -> StepData:
    """Logprobs at random, NaN where nothing was sampled."""
    random = np.random.default_rng(0)
    batch = with_advantages(build_batch(GROUPS, GRPOConfig()), random.normal(size=5))
    mask = batch.ragged("loss_mask")
    columns = {
        name: mask.like(np.where(mask.values > 0, -random.exponential(1, len(mask.values)), np.nan))
        for name in ("prev_logprobs", "ref_logprobs")
    }
    return StepData(1, GROUPS, batch.with_columns(columns))


@pytest.mark.parametrize(("estimator", "k"), [("k1", lambda d: -d), ("k3", lambda d: math.exp(d) - d - 1)])
def test_a_penalty_on_rewards_is_the_weighted_estimate_at_each_sampled_token(estimator, k):
    batch = step_data().batch
    objective = Objective(
        PolicyLoss(), reward_kl=KLPenalty(weight=0.5, estimator=estimator, in_reward=True, input_clamp=1.0)
    )
    assert objective.columns >= {"prev_logprobs", "ref_logprobs"}
    mask, prev, ref = (batch.ragged(name).values for name in ("loss_mask", "prev_logprobs", "ref_logprobs"))
    expected = [0.5 * k(min(max(r - p, -1.0), 1.0)) if m else 0.0 for m, p, r in zip(mask, prev, ref, strict=True)]
    found = objective.penalties(batch)
    np.testing.assert_allclose(found.values, expected, rtol=1e-12)
    reported = objective.observe({})
    assert reported == {"policy/kl": pytest.approx(sum(expected) / 0.5 / mask.sum())}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_without_clamps_is_finite_in_float32_at_extreme_log_ratios(estimator):
    batch = step_data().batch
    mask = batch.ragged("loss_mask")
    extreme = [0.0, -200.0, -200.0, 0.0, -1.0]
    columns = {
        name: mask.like(np.where(mask.values > 0, np.resize(values, len(mask.values)), np.nan).astype(np.float32))
        for name, values in (("prev_logprobs", extreme), ("ref_logprobs", extreme[::-1]))
    }
    kl = KLPenalty(weight=0.5, estimator=estimator, in_reward=True, input_clamp=None, output_clamp=None)
    found = kl_estimates(kl, batch.with_columns(columns)).values.astype(np.float32)
    assert np.isfinite(found).all()
    assert not found[mask.values == 0].any()


def test_weights_by_age_are_told_the_version_of_the_policy():
    weights = FakeWeights(FakeModel())
    objective = Objective(PolicyLoss(staleness=StalenessDecay(decay=0.9)), weights=weights)
    assert "weight_versions" in objective.columns
    for version in (1, 2):
        weights.publish()
        assert objective.loss.weight_version == version


def test_an_objective_without_parts_adds_nothing():
    objective, data = Objective(PolicyLoss()), step_data()
    assert objective.penalties(data.batch) is None
    assert objective.prepared(data) is data.batch
    assert objective.observe({"policy/kl": Metric(1.0)}) == {}
    assert objective.state() == {}


def covariances(data: StepData) -> tuple[np.ndarray, np.ndarray]:
    """Written out: each sampled token's place among all tokens, and its covariance."""
    mask = data.batch.ragged("loss_mask")
    places = np.flatnonzero(mask.values)
    prev = data.batch.ragged("prev_logprobs").values[places]
    advantages = np.repeat(data.batch.array("advantages"), mask.lengths)[places]
    return places, (prev - prev.mean()) * (advantages - advantages.mean())


def test_kl_cov_chooses_the_tokens_of_highest_covariance_of_the_step():
    data = step_data()
    places, covariance = covariances(data)
    chosen = high_covariance(KLCov(share=0.3), seed=0)(data).values
    assert sorted(np.flatnonzero(chosen)) == sorted(places[np.argsort(covariance)[-3:]])
    assert high_covariance(KLCov(share=1e-6), seed=0)(data).values.sum() == 1


def test_clip_cov_chooses_at_random_within_bounds_and_alike_for_the_same_step():
    data = step_data()
    places, covariance = covariances(data)
    low, high = np.quantile(covariance, [0.2, 0.9])
    statistic = high_covariance(ClipCov(share=0.4, low=low, high=high), seed=7)
    chosen = np.flatnonzero(statistic(data).values)
    assert len(chosen) == 4
    assert set(chosen) <= set(places[(covariance >= low) & (covariance <= high)])
    assert np.array_equal(np.flatnonzero(statistic(data).values), chosen)
    others = [np.flatnonzero(statistic(StepData(step, GROUPS, data.batch)).values) for step in range(2, 12)]
    assert any(not np.array_equal(other, chosen) for other in others)
    nothing = high_covariance(ClipCov(share=1.0, low=90.0, high=99.0), seed=7)
    assert nothing(data).values.sum() == 0


@pytest.mark.parametrize(("share", "num"), [(0.2, 2), (0.25, 3), (0.9, 9), (1e-9, 1)])
def test_the_tokens_of_highest_entropy_of_the_step_train(share, num):
    data = step_data()
    mask = data.batch.ragged("loss_mask")
    sampled = np.flatnonzero(mask.values)
    assert len(sampled) == 10
    entropy = np.where(mask.values > 0, np.random.default_rng(1).permutation(len(mask.values)), np.nan)
    batch = data.batch.with_columns({"prev_entropy": mask.like(entropy.astype(np.float32))})
    chosen = high_entropy(share)(StepData(1, GROUPS, batch)).values
    assert sorted(np.flatnonzero(chosen)) == sorted(sampled[np.argsort(entropy[sampled])[-num:]])
    flat = data.batch.with_columns({"prev_entropy": mask.like(np.where(mask.values > 0, 1.0, np.nan))})
    assert np.array_equal(high_entropy(share)(StepData(1, GROUPS, flat)).values, mask.values)


@pytest.mark.parametrize("bound", [1e-9, 0.05, 0.3, 1e9])
def test_tokens_of_the_largest_squares_are_left_out_until_the_mean_is_small(bound):
    data = step_data()
    mask = data.batch.ragged("loss_mask")
    sampled = np.flatnonzero(mask.values)
    random = np.random.default_rng(3)
    columns = {name: random.normal(0, 0.5, len(mask.values)) for name in ("prev_logprobs", "generation_logprobs")}
    batch = data.batch.with_columns({name: mask.like(values) for name, values in columns.items()})
    chosen = np.flatnonzero(small_moment(bound)(StepData(1, GROUPS, batch)).values)
    left = {t: (columns["prev_logprobs"][t] - columns["generation_logprobs"][t]) ** 2 for t in sampled}
    while left and sum(left.values()) / len(left) > bound:
        del left[max(left, key=left.get)]
    assert set(chosen) == set(left)


def test_what_is_read_before_the_update_follows_from_the_parts_in_use():
    class Reading(FakeModel):
        def __init__(self):
            super().__init__()
            self.reads = []

        def infer(self, batch, reads, *, reference=False, temperature=1.0):
            self.reads.append((reference, temperature, tuple((read.name, read.token_filter) for read in reads)))
            return super().infer(batch, reads, reference=reference, temperature=temperature)

    keep = TokenFilter(top_p=0.9)
    loss = PolicyLoss(on_policy=True, kl=KLPenalty(weight=0.1), temperature=0.5, token_filter=keep)
    objective = Objective(loss, read_before=("prev_logprobs", "prev_collision"))
    policy, batch = Reading(), build_batch(GROUPS, GRPOConfig())
    found = with_logprobs(batch, policy, objective)
    assert {"prev_logprobs", "prev_collision", "ref_logprobs"} <= set(found)
    assert "prev_entropy" not in found
    # the reference is read over all tokens
    assert policy.reads == [(False, 0.5, (("logprobs", keep), ("collision", keep))), (True, 0.5, (("logprobs", None),))]
    constrained, allowed = Reading(), TokenFilter(top_p=0.9, allowed=True)
    with_logprobs(batch, constrained, Objective(replace(loss, token_filter=allowed), read_before=("prev_logprobs",)))
    # and over the tokens that grammars allow
    assert constrained.reads[1] == (True, 0.5, (("logprobs", TokenFilter(allowed=True)),))
    other = Reading()
    assert set(with_logprobs(batch, other, Objective(PolicyLoss(on_policy=True)))) == set(batch)
    assert other.reads == []


def test_an_exact_objective_refuses_other_logprobs_than_the_generators():
    exact = Objective(PolicyLoss(on_policy=True), exact=True)
    policy, batch = FakeModel(), build_batch(GROUPS, GRPOConfig())
    prev, mask = policy.infer(batch, [LOGPROBS]).ragged("logprobs"), batch.ragged("loss_mask")
    equal = batch.with_columns({"generation_logprobs": mask.like(np.where(mask.values > 0, prev.values, 7.0))})
    assert np.array_equal(with_logprobs(equal, policy, exact).ragged("prev_logprobs").values, prev.values)
    row = len(mask) - 1
    place = int(np.flatnonzero(mask.values)[-1])
    for value in (np.nextafter(prev.values[place], np.float32(9)), np.float32("nan")):
        values = equal.ragged("generation_logprobs").values.copy()
        values[place] = value
        changed = equal.with_columns({"generation_logprobs": mask.like(values)})
        with pytest.raises(LogprobsDiffer) as error:
            with_logprobs(changed, policy, exact)
        where = f"row {row} of the step, position {place - mask.offsets[row]} "
        for part in (where, repr(float(prev.values[place])), repr(float(value)), "1 of ", "rl doctor mismatch"):
            assert part in str(error.value)


def test_positive_examples_have_a_reward_above_zero():
    assert positive_examples(step_data()).tolist() == [1, 0, 0, 1, 1]


def test_statistics_become_columns_of_the_batch():
    objective = Objective(PolicyLoss(positive_example_nll_weight=0.1), statistics={"positive": positive_examples})
    assert "positive" not in objective.columns
    assert objective.prepared(step_data()).array("positive").tolist() == [1, 0, 0, 1, 1]


@pytest.mark.parametrize(("measured", "factor"), [(0.1, 1.0), (0.11, 1.01), (5.0, 1.02), (0.0, 0.98)])
def test_the_weight_of_kl_follows_its_target_within_bounds(measured, factor):
    weight = AdaptiveKL(KLPenalty(weight=0.5, target=0.1, horizon=10), rollouts_per_step=1)
    weight.observe(measured)
    assert weight.value == pytest.approx(0.5 * factor)


def test_the_weight_of_entropy_rises_below_the_target_falls_above_it_and_applies_below():
    weight = AdaptiveEntropy(EntropyBonus(target=1.0, weight_step=0.1))
    seen = []
    for measured in (0.5, 0.6, 1.5, 0.9, 2.0, 2.0, 2.0):
        weight.observe(measured)
        seen.append(weight.value)
    assert seen == pytest.approx([0.1, 0.2, 0.0, 0.2, 0.0, 0.0, 0.0])


def adaptive() -> Objective:
    return Objective(
        PolicyLoss(kl=KLPenalty(weight=0.2), entropy_bonus=EntropyBonus(weight=0.01)),
        kl_weight=AdaptiveKL(KLPenalty(weight=0.2, target=0.1, horizon=2), rollouts_per_step=1),
        entropy_weight=AdaptiveEntropy(EntropyBonus(weight=0.01, target=1.0, weight_step=0.1)),
    )


def test_adaptive_weights_are_in_the_loss_reported_and_resumed():
    objective = adaptive()
    measured = {"policy/kl": Metric(1.0), "policy/entropy": Metric(2.0)}
    reported = objective.observe(measured)
    assert reported == {"policy/kl_weight": 0.2, "policy/entropy_weight": 0.01}
    assert objective.loss.kl.weight == pytest.approx(0.22)
    assert objective.loss.entropy_bonus.weight == 0.0
    other = adaptive()
    other.restore(Objective(PolicyLoss()).state())
    assert other.loss == adaptive().loss
    other.restore(objective.state())
    for each in (objective, other):
        each.observe(measured | {"policy/entropy": Metric(0.5)})
    assert other.loss == objective.loss


def test_the_penalty_on_rewards_has_the_weight_in_force():
    batch = step_data().batch
    kl = KLPenalty(weight=0.5, in_reward=True, target=1e-3, horizon=1)
    objective = Objective(PolicyLoss(), reward_kl=kl, kl_weight=AdaptiveKL(kl, rollouts_per_step=1))
    first = objective.penalties(batch).values
    assert set(objective.observe({})) == {"policy/kl", "policy/kl_weight"}
    np.testing.assert_allclose(objective.penalties(batch).values, 1.2 * first)


def test_the_effective_sample_size_follows_from_the_moments_of_the_weights():
    weights = np.array([0.5, 1.0, 2.0, 0.1])
    moments = {
        "mismatch/weight": Metric(weights.sum(), len(weights)),
        "mismatch/weight_squared": Metric((weights**2).sum(), len(weights)),
    }
    expected = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    assert Objective(PolicyLoss()).observe(moments) == {"mismatch/effective_sample_size": pytest.approx(expected)}
    assert Objective(PolicyLoss()).observe({name: Metric(0.0, 0.0) for name in moments}) == {}
