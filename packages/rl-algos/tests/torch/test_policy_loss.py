"""The policy loss and its gradient against an oracle in float64, and what must not change it."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import LENGTHS, LOSSES, SEQUENCE_MEAN, loss_and_gradients, make_batch, rows_of
from loss_oracle import oracle

from rl_algos.losses.importance import ImportanceCorrection, Rejection
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.surrogates import GSPO, SURROGATES
from rl_algos.losses.terms import EntropyBonus, Filters, KLPenalty
from rl_algos.torch.policy_loss import compute
from rl_algos.torch.surrogates import COMPUTATIONS
from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged
from rl_core.token_filter import TokenFilter

WHOLE, SPLIT = [range(5)], [[3], [0, 4], [2], [1]]


def with_token_advantages(batch: Batch) -> Batch:
    advantages = np.random.default_rng(1).normal(size=sum(LENGTHS))
    return batch.with_columns({"advantages": batch.ragged("tokens").like(advantages)})


def differences(loss: PolicyLoss, batch: Batch, name: str) -> np.ndarray:
    """Central finite differences of the oracle by one read, what is under a stop-gradient held."""
    column, h = batch.ragged(name), 1e-6
    frozen = batch.ragged("logprobs").values
    found = np.zeros(len(column.values))
    for token in range(len(found)):
        nudge = np.zeros(len(found))
        nudge[token] = h
        up, down = (
            oracle(loss, batch.with_columns({name: column.like(column.values + sign * nudge)}), frozen)
            for sign in (1, -1)
        )
        found[token] = (up - down) / (2 * h)
    return found


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_equals_the_oracle(name, scale):
    for batch in (make_batch(scale=scale), with_token_advantages(make_batch(2, scale=scale))):
        value, _ = loss_and_gradients(LOSSES[name], batch, WHOLE)
        assert value == pytest.approx(oracle(LOSSES[name], batch), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_equals_finite_differences_of_the_oracle(name):
    for batch in (make_batch(3), with_token_advantages(make_batch(4))):
        _, gradients = loss_and_gradients(LOSSES[name], batch, WHOLE)
        for read, gradient in gradients.items():
            np.testing.assert_allclose(gradient, differences(LOSSES[name], batch, read), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_add_up_to_the_whole(name):
    batch = with_token_advantages(make_batch())
    whole = loss_and_gradients(LOSSES[name], batch, WHOLE)
    split = loss_and_gradients(LOSSES[name], batch, SPLIT)
    assert split[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-14)
    for read in ("logprobs", "entropy"):
        np.testing.assert_allclose(split[1][read], whole[1][read], atol=1e-14)


def in_segments(batch: Batch) -> Batch:
    """The same tokens, with rows cut in several, and `pair`, the number of the row that each is a part of."""
    counts = [2, 3, 1, 2, 1]
    cut = [part for n, count in zip(LENGTHS, counts, strict=True) for part in np.array_split(np.arange(n), count)]
    offsets = np.cumsum([0, *map(len, cut)])
    columns = {
        name: Ragged(column.values, offsets) if isinstance(column := batch[name], Ragged) else np.repeat(column, counts)
        for name in batch
    }
    return Batch({**columns, PAIR: np.repeat(np.arange(5), counts)})


MASKED = [name for name, loss in LOSSES.items() if not loss.observation_nll_weight]
"""Losses that read nothing off the mask, so that a row may be cut anywhere."""


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("name", MASKED)
def test_a_sequence_of_several_rows_has_the_loss_of_one_row(name, scale):
    loss = dataclasses.replace(LOSSES[name], has_segments=True)
    for batch in (make_batch(scale=scale), with_token_advantages(make_batch(2, scale=scale))):
        segments = in_segments(batch)
        reads_whole_sequences = PAIR in loss.columns
        parts = (
            [range(9)],
            [[6, 7], [0, 1, 8], [5], [2, 3, 4]] if reads_whole_sequences else [[3, 8, 0], [1, 2], [4, 5, 6, 7]],
        )
        if not reads_whole_sequences:
            segments = segments.only([column for column in segments if column != PAIR])
        _, expected = loss_and_gradients(LOSSES[name], batch, WHOLE)
        for microbatches in parts:
            value, gradients = loss_and_gradients(loss, segments, microbatches)
            assert value == pytest.approx(oracle(LOSSES[name], batch), rel=1e-9, abs=1e-12)
            for read, gradient in gradients.items():
                np.testing.assert_allclose(gradient, expected[read], atol=1e-12)


def test_only_terms_of_whole_sequences_keep_the_rows_of_one_together():
    together = {name for name in LOSSES if PAIR in dataclasses.replace(LOSSES[name], has_segments=True).columns}
    assert {"sequence mean", "gspo", "vespo", "topr", "seq mask", "sequence weights", "rejection by max k3"} <= together
    assert {"off-policy sequence mask", "mismatch threshold", "drgrpo"} <= together
    assert not {"clip", "token sum", "cispo", "tis", "icepop", "k3 unbiased", "positive nll"} & together
    assert not any(PAIR in loss.columns for loss in LOSSES.values())


TOKEN_COLUMNS = ("logprobs", "entropy", "prev_logprobs", "ref_logprobs", "generation_logprobs")


def extreme_batch(seed: int) -> Batch:
    """float32, log-ratios up to 200 on the mask; infinities and NaN off it."""
    random = np.random.default_rng(seed)
    batch = make_batch(seed)
    off = batch.ragged("loss_mask").values == 0
    columns = {}
    for name in TOKEN_COLUMNS:
        values = random.choice([-200.0, -100.0, -1.0, -0.1, 0.0], size=len(off)).astype(np.float32)
        values[off] = random.choice([np.inf, -np.inf, np.nan], size=int(off.sum()))
        columns[name] = batch.ragged("tokens").like(values)
    advantages = random.normal(size=len(off)).astype(np.float32)
    advantages[off] = np.nan
    return batch.with_columns({**columns, "advantages": batch.ragged("tokens").like(advantages)})


@pytest.mark.parametrize("name", MASKED)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_extreme_log_ratios_and_what_lies_off_the_mask_leave_everything_finite(name, seed):
    batch, loss = extreme_batch(seed), LOSSES[name]
    assert all(np.isfinite(total) for total in loss.totals(batch).values())
    value, gradients = loss_and_gradients(loss, batch, SPLIT)
    assert np.isfinite(value)
    for gradient in gradients.values():
        assert np.isfinite(gradient).all()
        assert not gradient[batch.ragged("loss_mask").values == 0].any()
    metrics = compute(loss, *rows_of(batch, range(5))).metrics
    assert all(torch.isfinite(metric.value) for metric in metrics.values())


@pytest.mark.parametrize("truncation", ["tis", "icepop", "seq-mask-tis"])
def test_a_sequence_meant_to_be_dropped_gives_no_nan(truncation):
    batch = make_batch()
    generation = batch.ragged("generation_logprobs")
    far = generation.like((generation.values - np.repeat([200.0, 0, 0, 0, 0], LENGTHS)).astype(np.float32))
    correction = ImportanceCorrection(truncation=truncation, low=0.5, high=2.0)
    loss = PolicyLoss(importance=correction, mismatch_threshold=5.0)
    value, gradients = loss_and_gradients(loss, batch.with_columns({"generation_logprobs": far}), SPLIT)
    assert np.isfinite(value)
    assert np.isfinite(gradients["logprobs"]).all()
    assert not gradients["logprobs"][: LENGTHS[0]].any()


def test_gspo_with_weights_leaves_out_whole_sequences_or_nothing():
    batch = make_batch()
    generation = batch.ragged("generation_logprobs")
    other = generation.like(generation.values - np.repeat([1.0, 0, 0, 0, 0], LENGTHS))
    batch = batch.with_columns({"generation_logprobs": other})
    correction = ImportanceCorrection(truncation="icepop", low=0.3, high=3.0, level="sequence")
    loss = PolicyLoss(GSPO(clip_low=1, clip_high=10), SEQUENCE_MEAN, importance=correction)
    _, gradients = loss_and_gradients(loss, batch, WHOLE)
    mask = batch.ragged("loss_mask")
    moved = [set(row[own > 0] != 0) for row, own in zip(mask.like(gradients["logprobs"]), mask, strict=True)]
    assert all(len(each) <= 1 for each in moved)
    assert {True} in moved[:4]
    assert {False} in moved[:4]


def test_a_sequence_that_two_filters_leave_out_counts_once():
    correction = ImportanceCorrection(
        truncation="seq-mask-tis", high=1e-6, rejection=Rejection(statistic="max", estimator="k2", high=0.0)
    )
    loss = PolicyLoss(importance=correction, mismatch_threshold=1.0, filters=Filters(off_policy_threshold=1e-9))
    metric = compute(loss, *rows_of(make_batch(), range(5))).metrics["mismatch/masked_sequences"]
    # the third row samples nothing
    assert metric.value.item() == 4


def test_mismatch_metrics_compare_trainer_and_generator():
    batch = make_batch()
    metrics = compute(PolicyLoss(), *rows_of(batch, range(5))).metrics
    mask = batch.ragged("loss_mask").values.astype(bool)
    difference = (batch.ragged("prev_logprobs").values - batch.ragged("generation_logprobs").values)[mask]
    assert metrics["mismatch/max"].value.item() == pytest.approx(np.abs(difference).max())
    assert metrics["mismatch/mean"].value.item() / mask.sum() == pytest.approx(np.exp(np.abs(difference)).mean())
    weights = np.exp(difference)
    assert metrics["mismatch/weight"].value.item() / mask.sum() == pytest.approx(weights.mean())
    assert metrics["mismatch/weight_squared"].value.item() / mask.sum() == pytest.approx((weights**2).mean())
    assert metrics["mismatch/kl"].value.item() / mask.sum() == pytest.approx(
        (np.exp(difference) - difference - 1).mean()
    )
    assert metrics["mismatch/masked_sequences"].value.item() == 0


def test_entropy_is_reported_if_it_is_read_and_the_negative_logprob_always():
    batch = make_batch()
    mask = batch.ragged("loss_mask").values.astype(bool)
    plain = compute(PolicyLoss(), *rows_of(batch, range(5))).metrics
    assert plain["policy/nll"].value.item() == pytest.approx(-batch.ragged("logprobs").values[mask].sum())
    assert "policy/entropy" not in plain
    read = compute(PolicyLoss(entropy_bonus=EntropyBonus(weight=0.0)), *rows_of(batch, range(5))).metrics
    assert read["policy/entropy"].value.item() == pytest.approx(batch.ragged("entropy").values[mask].sum())


def test_entropy_and_kl_are_measured_without_any_term_of_the_loss():
    batch = make_batch()
    measuring = PolicyLoss(
        kl=KLPenalty(weight=0.0, measured=True), entropy_bonus=EntropyBonus(weight=0.0, measured=True)
    )
    parts = [range(5)]
    value, gradients = loss_and_gradients(PolicyLoss(), batch, parts)
    measured, own = loss_and_gradients(measuring, batch, parts)
    assert measured == value
    np.testing.assert_array_equal(own["logprobs"], gradients["logprobs"])
    assert not own["entropy"].any()
    plain, metrics = (compute(loss, *rows_of(batch, range(5))).metrics for loss in (PolicyLoss(), measuring))
    assert metrics.keys() - plain.keys() == {"policy/kl", "policy/entropy"}


def test_rows_that_sample_nothing_count_as_no_sequence():
    totals = PolicyLoss(positive_example_nll_weight=0.1).totals(make_batch())
    mask = make_batch().ragged("loss_mask")
    assert totals["sequences"] == 4
    assert totals["tokens"] == mask.values.sum()
    assert totals["positive_tokens"] == mask[0].sum() + mask[4].sum()


def test_the_loss_asks_only_for_columns_and_reads_that_it_uses():
    assert "prev_logprobs" not in PolicyLoss(on_policy=True).columns
    assert "ref_logprobs" not in PolicyLoss().columns
    assert "ref_logprobs" in PolicyLoss(kl=KLPenalty(weight=0.1)).columns
    assert "high_covariance" in LOSSES["clip-cov"].columns
    assert "positive" in LOSSES["positive nll"].columns
    assert "high_entropy" in LOSSES["high entropy only"].columns
    assert [read.name for read in PolicyLoss().reads] == ["logprobs"]
    assert [read.name for read in PolicyLoss(entropy_bonus=EntropyBonus(weight=0.0)).reads] == ["logprobs", "entropy"]
    assert dataclasses.replace(PolicyLoss(), aggregation=SEQUENCE_MEAN).aggregation.denominator == "sequences"


def test_reads_have_the_filter_of_sampling():
    loss = PolicyLoss(entropy_bonus=EntropyBonus(weight=0.1), token_filter=TokenFilter(top_p=0.9))
    assert [(read.name, read.token_filter) for read in loss.reads] == [
        ("logprobs", TokenFilter(top_p=0.9)),
        ("entropy", TokenFilter(top_p=0.9)),
    ]


def test_every_surrogate_has_a_computation():
    assert set(COMPUTATIONS) == set(SURROGATES.values())
