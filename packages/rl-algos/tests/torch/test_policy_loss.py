"""The policy loss against the formulas written out token by token in float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rl_algos.losses.policy import ImportanceCorrection, KLPenalty, PolicyLoss
from rl_algos.torch.policy_loss import compute
from rl_core.batch import Batch
from rl_core.ragged import Ragged
from rl_core.torch.loss import Rows

LOSSES = {
    "ppo": PolicyLoss(),
    "asymmetric": PolicyLoss(clip_low=0.1, clip_high=0.4),
    "dual clip": PolicyLoss(dual_clip=1.5),
    "sequence level": PolicyLoss(level="sequence"),
    "gspo": PolicyLoss(sequence_ratio=True, level="sequence"),
    "cispo": PolicyLoss(cispo=True, clip_high=0.3),
    "on policy": PolicyLoss(on_policy=True),
    "k1": PolicyLoss(kl=KLPenalty(0.3, "k1")),
    "k2": PolicyLoss(kl=KLPenalty(0.3, "k2")),
    "k3": PolicyLoss(kl=KLPenalty(0.3, "k3"), level="sequence"),
    "kl clamps": PolicyLoss(kl=KLPenalty(0.3, "k3", input_clamp=0.2, output_clamp=0.01)),
    "importance": PolicyLoss(importance=ImportanceCorrection("tis"), kl=KLPenalty(0.3)),
    "tis": PolicyLoss(importance=ImportanceCorrection("tis", high=1.1)),
    "icepop": PolicyLoss(importance=ImportanceCorrection("icepop", low=0.9, high=1.1), kl=KLPenalty(0.3)),
    "seq mask": PolicyLoss(importance=ImportanceCorrection("seq-mask-tis", low=0.97, high=1.03)),
    "mismatch threshold": PolicyLoss(mismatch_threshold=1.12, kl=KLPenalty(0.3)),
}


def make_batch(seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    lengths = [5, 9, 1, 7, 4]

    def per_token(scale):
        return Ragged.from_rows([random.normal(-1, scale, n) for n in lengths], np.float64)

    mask = [(random.random(n) < 0.7).astype(np.uint8) for n in lengths]
    mask[2][:] = 0
    generation = per_token(0.4)
    return Batch(
        {
            "tokens": Ragged.from_rows([np.arange(n) for n in lengths], np.int32),
            "logprobs": generation.like(generation.values + random.normal(0, 0.3, sum(lengths))),
            "prev_logprobs": generation.like(generation.values + random.normal(0, 0.1, sum(lengths))),
            "ref_logprobs": generation.like(generation.values + random.normal(0, 0.5, sum(lengths))),
            "generation_logprobs": generation,
            "loss_mask": Ragged.from_rows(mask, np.uint8),
            "advantages": np.array([1.0, -2.0, 1.5, -0.5, 0.0]),
        }
    )


def oracle(loss: PolicyLoss, batch: Batch) -> float:
    """The loss of the whole batch, one token at a time."""
    total, count = 0.0, 0.0
    for row in range(len(batch)):
        column = {name: batch[name][row] for name in batch}
        sampled = np.flatnonzero(column["loss_mask"])
        if not len(sampled):
            continue
        logp, gen = column["logprobs"], column["generation_logprobs"]
        prev = logp if loss.on_policy else column["prev_logprobs"]
        kept = 1.0
        if loss.mismatch_threshold is not None:
            kept = float(np.mean([math.exp(abs(prev[t] - gen[t])) for t in sampled]) <= loss.mismatch_threshold)
        values = [token_loss(loss, column, t, sampled, prev) * kept for t in sampled]
        if loss.level == "token":
            total, count = total + sum(values), count + len(values)
        else:
            total, count = total + sum(values) / len(values), count + 1
    return total / count


def token_loss(loss: PolicyLoss, column, t: int, sampled, prev) -> float:
    logp, gen = column["logprobs"], column["generation_logprobs"]
    advantage = np.broadcast_to(column["advantages"], column["tokens"].shape)[t]
    log_ratio = np.mean([logp[i] - prev[i] for i in sampled]) if loss.sequence_ratio else logp[t] - prev[t]
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
    value = -advantage * clipped * logp[t] if loss.cispo else max(-advantage * ratio, -advantage * clipped)
    if loss.dual_clip is not None and advantage < 0:
        value = min(value, -loss.dual_clip * advantage)
    value *= importance_weight(loss.importance, prev, gen, t, sampled) if loss.importance else 1.0
    return value + (loss.kl.weight * kl(loss.kl, column["ref_logprobs"][t] - logp[t]) if loss.kl else 0.0)


def importance_weight(correction: ImportanceCorrection, prev, gen, t: int, sampled) -> float:
    weight = math.exp(prev[t] - gen[t])
    low, high = correction.low or 0.0, correction.high or math.inf
    if correction.truncation == "tis":
        return min(weight, high)
    if correction.truncation == "icepop":
        return weight if low <= weight <= high else 0.0
    mean = math.exp(np.mean([prev[i] - gen[i] for i in sampled]))
    return weight if low <= mean <= high else 0.0


def kl(penalty: KLPenalty, d: float) -> float:
    d = min(max(d, -penalty.input_clamp), penalty.input_clamp)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[penalty.estimator]
    return min(max(value, -penalty.output_clamp), penalty.output_clamp)


def rows_of(batch: Batch, rows) -> tuple[torch.Tensor, Rows]:
    part = batch.select(rows)
    columns = {name: torch.from_numpy(getattr(part[name], "values", part[name])) for name in part}
    return columns.pop("logprobs").requires_grad_(), Rows(torch.from_numpy(part.ragged("tokens").offsets), columns)


def loss_and_gradient(loss: PolicyLoss, batch: Batch, parts) -> tuple[float, np.ndarray]:
    """Loss and its gradient on the logprobs, summed over microbatches."""
    totals = loss.totals(batch)
    value, gradient = 0.0, {}
    for rows in parts:
        logprobs, columns = rows_of(batch, rows)
        share = compute(loss, {"logprobs": logprobs}, columns).loss(totals)
        share.backward()
        value += share.item()
        ends = np.cumsum(batch.ragged("tokens").lengths[list(rows)])
        gradient.update(zip(rows, np.split(logprobs.grad.numpy(), ends[:-1]), strict=True))
    return value, np.concatenate([gradient[row] for row in range(len(batch))])


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_equals_the_formula(name):
    batch = make_batch()
    value, _ = loss_and_gradient(LOSSES[name], batch, [range(len(batch))])
    assert value == pytest.approx(oracle(LOSSES[name], batch), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_advantages_may_differ_by_token(name):
    batch = make_batch()
    advantages = np.random.default_rng(1).normal(size=len(batch.ragged("tokens").values))
    batch = batch.with_columns({"advantages": batch.ragged("tokens").like(advantages)})
    value, _ = loss_and_gradient(LOSSES[name], batch, [[3], [0, 4], [2], [1]])
    assert value == pytest.approx(oracle(LOSSES[name], batch), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if not (loss.cispo or loss.on_policy)])
def test_the_gradient_equals_finite_differences_of_the_formula(name):
    batch = make_batch()
    _, gradient = loss_and_gradient(LOSSES[name], batch, [range(len(batch))])
    logprobs, h = batch.ragged("logprobs"), 1e-6
    for token in range(len(logprobs.values)):
        nudge = np.zeros(len(logprobs.values))
        nudge[token] = h
        up, down = (
            oracle(LOSSES[name], batch.with_columns({"logprobs": logprobs.like(logprobs.values + s * nudge)}))
            for s in (1, -1)
        )
        assert gradient[token] == pytest.approx((up - down) / (2 * h), abs=2e-7)


def test_cispo_gives_every_token_the_gradient_of_its_clipped_weight():
    batch, loss = make_batch(), LOSSES["cispo"]
    _, gradient = loss_and_gradient(loss, batch, [range(len(batch))])
    ratio = np.exp(batch.ragged("logprobs").values - batch.ragged("prev_logprobs").values)
    advantages = np.repeat(batch["advantages"], batch.ragged("tokens").lengths)
    mask = batch.ragged("loss_mask").values
    np.testing.assert_allclose(gradient, -advantages * np.clip(ratio, 0.8, 1.3) * mask / mask.sum(), atol=1e-15)


def test_on_policy_is_the_plain_policy_gradient():
    batch = make_batch()
    _, gradient = loss_and_gradient(LOSSES["on policy"], batch, [range(len(batch))])
    advantages = np.repeat(batch["advantages"], batch.ragged("tokens").lengths)
    mask = batch.ragged("loss_mask").values
    np.testing.assert_allclose(gradient, -advantages * mask / mask.sum(), atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_add_up_to_the_whole(name):
    batch = make_batch()
    whole = loss_and_gradient(LOSSES[name], batch, [range(5)])
    split = loss_and_gradient(LOSSES[name], batch, [[3], [0, 4], [2], [1]])
    assert split[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(split[1], whole[1], atol=1e-15)


def test_rows_that_sample_nothing_count_as_no_sequence():
    totals = PolicyLoss().totals(make_batch())
    assert totals["sequences"] == 4
    assert totals["tokens"] == make_batch().ragged("loss_mask").values.sum()


def test_mismatch_metrics_compare_trainer_and_generator():
    batch, loss = make_batch(), PolicyLoss(importance=LOSSES["seq mask"].importance)
    logprobs, columns = rows_of(batch, range(5))
    metrics = compute(loss, {"logprobs": logprobs}, columns).metrics
    mask = batch.ragged("loss_mask").values.astype(bool)
    difference = (batch.ragged("prev_logprobs").values - batch.ragged("generation_logprobs").values)[mask]
    assert metrics["mismatch/max"].value.item() == pytest.approx(np.abs(difference).max())
    assert metrics["mismatch/mean"].value.item() / mask.sum() == pytest.approx(np.exp(np.abs(difference)).mean())
    assert metrics["mismatch/kl"].value.item() / mask.sum() == pytest.approx(
        (np.exp(difference) - difference - 1).mean()
    )
    rows = np.split(mask, batch.ragged("tokens").offsets[1:-1])
    sizes = np.split(
        batch.ragged("prev_logprobs").values - batch.ragged("generation_logprobs").values,
        batch.ragged("tokens").offsets[1:-1],
    )
    means = [math.exp(size[row].mean()) if row.any() else 1.0 for size, row in zip(sizes, rows, strict=True)]
    assert metrics["mismatch/masked_sequences"].value.item() == sum(not 0.97 <= mean <= 1.03 for mean in means)


def test_the_loss_asks_only_for_columns_it_uses():
    assert "prev_logprobs" not in PolicyLoss(on_policy=True).columns
    assert "ref_logprobs" not in PolicyLoss().columns
    assert "ref_logprobs" in PolicyLoss(kl=KLPenalty(0.1)).columns
    assert dataclasses.replace(PolicyLoss(), level="sequence").denominator == "sequences"
