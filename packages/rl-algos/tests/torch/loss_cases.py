"""Policy losses to test, batches for them, and how a worker computes one."""

import numpy as np
import torch

from rl_algos.losses.importance import ImportanceCorrection, Rejection
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.surrogates import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    TOPR,
    VESPO,
    Clip,
    ClipCov,
    KLCov,
    Reinforce,
)
from rl_algos.losses.terms import Aggregation, Demonstrations, EntropyBonus, Filters, KLPenalty, StalenessDecay
from rl_algos.torch.policy_loss import compute
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.torch.loss import Rows

HIGH_ENTROPY = Filters(top_entropy_share=0.4)
SEQUENCE_MEAN = Aggregation(name="sequence-mean")


def _weighed(surrogate=None, aggregation=None, **settings) -> PolicyLoss:
    """With importance weights, and a KL term that they must not touch."""
    correction = ImportanceCorrection(**settings)
    return PolicyLoss(
        surrogate or Clip(), aggregation or Aggregation(), importance=correction, kl=KLPenalty(weight=0.3)
    )


def _rejecting(statistic, estimator, high, low=None) -> PolicyLoss:
    return _weighed(rejection=Rejection(statistic=statistic, estimator=estimator, high=high, low=low))


LOSSES = {
    "clip": PolicyLoss(),
    "clip-higher": PolicyLoss(Clip(clip_low=0.1, clip_high=0.4)),
    "dual clip": PolicyLoss(Clip(dual_clip=1.5)),
    "sequence mean": PolicyLoss(aggregation=SEQUENCE_MEAN),
    "token sum": PolicyLoss(aggregation=Aggregation(name="token-sum")),
    "token sum, divided": PolicyLoss(aggregation=Aggregation(name="token-sum", divisor=7.0)),
    "drgrpo": PolicyLoss(aggregation=Aggregation(name="sequence-mean-token-sum", divisor=9.0)),
    "gspo": PolicyLoss(GSPO(), SEQUENCE_MEAN),
    "gspo dual clip": PolicyLoss(GSPO(clip_low=0.05, clip_high=0.05, dual_clip=1.1), SEQUENCE_MEAN),
    "luspo": PolicyLoss(GSPO(clip_low=0.05, clip_high=0.1), Aggregation(name="sequence-mean-token-sum")),
    "cispo": PolicyLoss(CISPO(clip_low=1.0, clip_high=0.3)),
    "reinforce": PolicyLoss(Reinforce()),
    "sapo": PolicyLoss(SAPO(tau_positive=1.0, tau_negative=1.5), SEQUENCE_MEAN),
    "gmpo": PolicyLoss(GMPO(clip_low=0.2, clip_high=0.3), SEQUENCE_MEAN),
    "gmpo, open below": PolicyLoss(GMPO(clip_low=1.0, clip_high=0.3), SEQUENCE_MEAN),
    "dppo-tv": PolicyLoss(DPPOTV(threshold=0.05)),
    "dppo-kl": PolicyLoss(DPPOKL(threshold=0.01)),
    "around generation": PolicyLoss(ratio_denominator="generation"),
    "around generation, one update": PolicyLoss(Clip(dual_clip=1.5), ratio_denominator="generation", on_policy=True),
    "gspo around generation": PolicyLoss(
        GSPO(), SEQUENCE_MEAN, ratio_denominator="generation", kl=KLPenalty(weight=0.3)
    ),
    "decoupled": PolicyLoss(importance=ImportanceCorrection(high=2.0)),
    "clip-cov": PolicyLoss(ClipCov()),
    "kl-cov": PolicyLoss(KLCov(weight=0.7)),
    "vespo": PolicyLoss(VESPO()),
    "topr": PolicyLoss(TOPR()),
    "dro": PolicyLoss(DRO(beta=0.4)),
    "second moment": PolicyLoss(Clip(), filters=Filters(max_second_moment=0.04, top_entropy_share=0.4)),
    "on policy": PolicyLoss(on_policy=True),
    "on policy gspo": PolicyLoss(GSPO(), SEQUENCE_MEAN, on_policy=True),
    "k1 unbiased": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k1", unbiased=True)),
    "k2": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k2")),
    "k3": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3"), aggregation=SEQUENCE_MEAN),
    "k3 unbiased": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3", unbiased=True)),
    "k3 unbiased, on policy": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3", unbiased=True), on_policy=True),
    "k3 from generation": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3", from_generation=True)),
    "k3 of DeepSeek-V3.2": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3", unbiased=True, from_generation=True)),
    "kl clamps": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3", input_clamp=0.2, output_clamp=0.01)),
    "k2 without clamps": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k2", input_clamp=None, output_clamp=None)),
    "k3 without clamps": PolicyLoss(kl=KLPenalty(weight=0.3, estimator="k3", input_clamp=None, output_clamp=None)),
    "k3 unbiased without clamps": PolicyLoss(
        kl=KLPenalty(weight=0.3, estimator="k3", input_clamp=None, output_clamp=None, unbiased=True)
    ),
    "importance": _weighed(),
    "tis": _weighed(high=1.1),
    "tis with a lower bound": _weighed(low=0.95, high=1.1),
    "icepop": _weighed(truncation="icepop", low=0.9, high=1.1),
    "seq mask": _weighed(truncation="seq-mask-tis", low=0.97, high=1.03),
    "sequence weights": _weighed(level="sequence", high=1.2),
    "sequence icepop": _weighed(level="sequence", truncation="icepop", low=0.8, high=1.2),
    "gspo, sequence weights": _weighed(GSPO(), SEQUENCE_MEAN, level="sequence", high=1.2),
    "rejection by mean k1": _rejecting("mean", "k1", 0.02, -0.02),
    "rejection by sum k2": _rejecting("sum", "k2", 0.02),
    "rejection by max k3": _rejecting("max", "k3", 0.02),
    "normalized weights": _weighed(high=1.1, batch_normalize=True),
    "normalized sequence weights": _weighed(Clip(), SEQUENCE_MEAN, level="sequence", batch_normalize=True),
    "normalized, rejecting": _weighed(
        Clip(), SEQUENCE_MEAN, rejection=Rejection(statistic="max", estimator="k2", high=0.02), batch_normalize=True
    ),
    "staleness": PolicyLoss(
        staleness=StalenessDecay(decay=0.7),
        weight_version=9,
        kl=KLPenalty(weight=0.3),
        entropy_bonus=EntropyBonus(weight=0.4),
    ),
    "staleness, weights": PolicyLoss(
        CISPO(),
        SEQUENCE_MEAN,
        staleness=StalenessDecay(decay=0.5),
        weight_version=9,
        importance=ImportanceCorrection(high=1.1),
    ),
    "staleness, normalized weights": PolicyLoss(
        staleness=StalenessDecay(decay=0.5), weight_version=9, importance=ImportanceCorrection(batch_normalize=True)
    ),
    "off-policy sequence mask": PolicyLoss(filters=Filters(off_policy_threshold=0.02), kl=KLPenalty(weight=0.3)),
    "mismatch threshold": PolicyLoss(mismatch_threshold=1.12, kl=KLPenalty(weight=0.3)),
    "entropy bonus": PolicyLoss(entropy_bonus=EntropyBonus(weight=0.4)),
    "entropy bonus and kl": PolicyLoss(
        entropy_bonus=EntropyBonus(weight=0.4), kl=KLPenalty(weight=0.3), aggregation=SEQUENCE_MEAN
    ),
    "positive nll": PolicyLoss(positive_example_nll_weight=0.2),
    "observation nll": PolicyLoss(observation_nll_weight=0.3),
    "high entropy only": PolicyLoss(filters=HIGH_ENTROPY, kl=KLPenalty(weight=0.3)),
    "high entropy only, gspo": PolicyLoss(GSPO(), SEQUENCE_MEAN, filters=HIGH_ENTROPY),
    "high entropy only, weights": PolicyLoss(
        filters=HIGH_ENTROPY, importance=ImportanceCorrection(high=1.1), positive_example_nll_weight=0.2
    ),
    "chord": PolicyLoss(demonstrations=Demonstrations(weight=0.3)),
    "chord, by probability": PolicyLoss(
        kl=KLPenalty(weight=0.3),
        entropy_bonus=EntropyBonus(weight=0.4),
        importance=ImportanceCorrection(high=1.1, batch_normalize=True),
        aggregation=SEQUENCE_MEAN,
        demonstrations=Demonstrations(weight=0.1, by_probability=True),
    ),
    "chord, with every other term": PolicyLoss(
        GSPO(),
        SEQUENCE_MEAN,
        mismatch_threshold=1.12,
        filters=Filters(off_policy_threshold=0.02),
        positive_example_nll_weight=0.2,
        observation_nll_weight=0.3,
        demonstrations=Demonstrations(weight=0.6),
    ),
    "luffy": PolicyLoss(demonstrations=Demonstrations(name="shaped")),
    "luffy, sequence mean": PolicyLoss(
        aggregation=SEQUENCE_MEAN,
        kl=KLPenalty(weight=0.3),
        importance=ImportanceCorrection(high=1.1),
        demonstrations=Demonstrations(name="shaped", gamma=0.5),
    ),
    "luffy, token sum": PolicyLoss(
        TOPR(), Aggregation(name="token-sum", divisor=7.0), demonstrations=Demonstrations(name="shaped")
    ),
    "luffy, drgrpo": PolicyLoss(
        CISPO(),
        Aggregation(name="sequence-mean-token-sum", divisor=9.0),
        positive_example_nll_weight=0.2,
        demonstrations=Demonstrations(name="shaped"),
    ),
}

LENGTHS = (5, 9, 1, 7, 4)


def make_batch(seed: int = 0, *, scale: float = 1.0) -> Batch:
    """Ragged rows, one of which samples nothing; `scale` multiplies all log-ratios."""
    random = np.random.default_rng(seed)
    total = sum(LENGTHS)

    def near(column: Ragged, deviation: float) -> Ragged:
        return column.like(np.minimum(column.values + scale * random.normal(0, deviation, total), -1e-3))

    generation = Ragged.from_rows([-random.exponential(1, n) - 0.01 for n in LENGTHS], np.float64)
    mask = [(random.random(n) < 0.7).astype(np.uint8) for n in LENGTHS]
    mask[2][:] = 0
    prev = near(generation, 0.1)
    return Batch(
        {
            "tokens": Ragged.from_rows([np.arange(n) for n in LENGTHS], np.int32),
            "logprobs": near(prev, 0.3),
            "entropy": generation.like(random.exponential(1, total)),
            "prev_logprobs": prev,
            "ref_logprobs": near(prev, 0.5),
            "generation_logprobs": generation,
            "loss_mask": Ragged.from_rows(mask, np.uint8),
            "advantages": np.array([1.0, -2.0, 1.5, -0.5, 0.0]),
            "high_covariance": generation.like((random.random(total) < 0.3).astype(np.uint8)),
            "weight_versions": generation.like(
                np.where(np.concatenate(mask) > 0, random.integers(5, 10, total), -1).astype(np.int32)
            ),
            "positive": np.array([1, 0, 1, 0, 1], np.uint8),
            "high_entropy": generation.like((random.random(total) < 0.4).astype(np.uint8)),
            "demonstration": np.array([0, 0, 0, 1, 0], np.uint8),
            "small_moment": generation.like((random.random(total) < 0.8).astype(np.uint8)),
        }
    )


def rows_of(batch: Batch, rows) -> tuple[dict[str, torch.Tensor], Rows]:
    """Reads, with gradient, and columns of a microbatch."""
    part = batch.select(rows)
    columns = {name: torch.from_numpy(getattr(part[name], "values", part[name])) for name in part}
    reads = {name: columns.pop(name).requires_grad_() for name in ("logprobs", "entropy")}
    return reads, Rows(torch.from_numpy(part.ragged("tokens").offsets), columns)


def loss_and_gradients(loss: PolicyLoss, batch: Batch, parts) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and its gradients by the reads, summed over microbatches."""
    totals = loss.totals(batch)
    value = 0.0
    gradients: dict[str, dict[int, np.ndarray]] = {"logprobs": {}, "entropy": {}}
    for rows in parts:
        reads, columns = rows_of(batch, rows)
        share = compute(loss, reads, columns).loss(totals)
        share.backward()
        value += share.item()
        ends = np.cumsum(batch.ragged("tokens").lengths[list(rows)])
        for name, read in reads.items():
            gradient = np.zeros(len(read)) if read.grad is None else read.grad.numpy()
            gradients[name].update(zip(rows, np.split(gradient, ends[:-1]), strict=True))
    joined = {name: np.concatenate([by_row[row] for row in range(len(batch))]) for name, by_row in gradients.items()}
    return value, joined
