"""The computations of `rl_algos.losses.preference`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_algos.losses import preference as described
from rl_core.data.microbatch import PAIR
from rl_core.torch.loss import LossSums, MetricSum, Rows

SURE = -1e-6
"""Largest averaged logprob for log odds: the log odds of a certain response are infinite."""

MAX_EXPONENT = 40.0
"""Largest exponent of an f-divergence: the square of its exponential, which IPO takes, is finite in float32."""


class Pairs(NamedTuple):
    """The rows of the two responses of each pair.

    Attributes:
        chosen, rejected: int64 `[pairs]`, rows of the microbatch.
    """

    chosen: Tensor
    rejected: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Pairs:
        """Read the columns `pair` and `is_chosen`; every pair must be whole."""
        by_pair = torch.argsort(rows[PAIR], stable=True)
        is_chosen = rows["is_chosen"][by_pair] > 0
        return cls(by_pair[is_chosen], by_pair[~is_chosen])

    def metrics(self, chosen: Tensor, rejected: Tensor) -> dict[str, MetricSum]:
        """Return accuracy and margin of rewards `[pairs]`, and their means; equal rewards count as half right."""
        values = {
            "accuracy": right(chosen - rejected),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        return {name: MetricSum(value.detach().sum(), "pairs") for name, value in values.items()}


def right(differences: Tensor) -> Tensor:
    """Return 1 if a difference is above 0, 0 if it is below, and one half if it is 0."""
    return (differences.sign() + 1) / 2


@dataclass(frozen=True)
class ResponseLogprobs:
    """Logprobs of whole responses, `[rows]` or `[pairs]`.

    Args:
        logprobs: Logprobs of the policy, summed over a response, with gradient.
        relative: The same minus the logprobs of the reference, or as they are if there is none, each times its weight.
        lengths: Tokens.
    """

    logprobs: Tensor
    relative: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, rows: Rows, *, uses_reference: bool) -> ResponseLogprobs:
        """Sum the logprobs of tokens `[tokens]`; tokens off the loss mask are left out."""
        mask = rows["loss_mask"] > 0
        own = torch.where(mask, logprobs, 0.0)
        # Subtract token by token: the difference of two sums would lose the digits that both have in common.
        relative = own - torch.where(mask, rows["ref_logprobs"], 0.0) if uses_reference else own
        if described.LENGTH_WEIGHTS in rows:
            relative = relative * rows[described.LENGTH_WEIGHTS]
        lengths = rows.row_sums(mask.to(logprobs.dtype)).clamp(min=1)
        return cls(rows.row_sums(own), rows.row_sums(relative), lengths)

    def select(self, index: Tensor) -> ResponseLogprobs:
        """Return the given rows."""
        return ResponseLogprobs(self.logprobs[index], self.relative[index], self.lengths[index])

    def rewards(self, loss: described.PreferenceLoss, *, averages: bool) -> Tensor:
        """Return the rewards that a term compares, before scaling."""
        rewards = _by_divergence(self.relative, loss)
        return rewards / self.lengths if averages else rewards


class Compared(NamedTuple):
    """The responses of pairs as a term sees them.

    Attributes:
        better, worse: `[pairs]`, rewards of the chosen and the rejected response, before scaling.
        longer: `[pairs]`, number of tokens that the chosen response has more.
        further: Columns of the term, `[pairs]`.
    """

    better: Tensor
    worse: Tensor
    longer: Tensor
    further: Mapping[str, Tensor]


def compute_pairs(loss: described.PreferenceLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `PreferenceLoss` over one microbatch of whole pairs.

    Args:
        loss: Loss with its terms and weights.
        reads: `logprobs` float32 `[tokens]`, with gradient, and `collision` to weigh pairs.
        rows: Columns of `loss.columns`.
    """
    term, pairs = loss.term, Pairs.of(rows)
    responses = ResponseLogprobs.of(reads["logprobs"], rows, uses_reference=term.uses_reference)
    chosen, rejected = responses.select(pairs.chosen), responses.select(pairs.rejected)
    terms = [described.AddedTerm(term, loss.weight, loss.average_logprobs), *loss.added]
    weights = _policy_weights(reads, rows, responses.lengths) if loss.weighs_by_policy else None
    objective, metrics = torch.zeros_like(chosen.logprobs).sum(), {}
    for place, added in enumerate(terms):
        averages = added.average_logprobs or added.term.averages
        compared = Compared(
            chosen.rewards(loss, averages=averages),
            rejected.rewards(loss, averages=averages),
            chosen.lengths - rejected.lengths,
            {name: rows[name][pairs.chosen] for name in added.term.columns},
        )
        values = _TERMS[type(added.term)](added.term, compared)
        if weights is not None:
            values = values * weights[pairs.chosen] * weights[pairs.rejected]
        objective = objective + added.weight * values.sum()
        metrics["preference_loss" if not place else f"preference_loss_{added.term.name}"] = _mean(values)
        if not place:
            metrics |= pairs.metrics(term.beta * compared.better, term.beta * compared.worse)
    if loss.sft_weight:
        nll = -(chosen.logprobs / chosen.lengths if loss.sft_average_logprobs else chosen.logprobs)
        objective = objective + loss.sft_weight * nll.sum()
        metrics["sft_loss"] = _mean(nll)
    metrics |= {"logprob_chosen": _mean(chosen.logprobs), "logprob_rejected": _mean(rejected.logprobs)}
    return LossSums({"pairs": objective}, metrics)


def _by_divergence(logratios: Tensor, loss: described.PreferenceLoss) -> Tensor:
    """Return the derivative of the divergence by the ratio, up to a constant."""
    if loss.divergence == "forward_kl":
        return 1 - torch.exp((-logratios).clamp(max=MAX_EXPONENT))
    if loss.divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(logratios)
    power = loss.alpha - 1
    if loss.divergence == "alpha_divergence" and abs(power) > 1e-6:
        return (torch.exp((power * logratios).clamp(max=MAX_EXPONENT)) - 1) / power
    return logratios


def _policy_weights(reads: Mapping[str, Tensor], rows: Rows, lengths: Tensor) -> Tensor:
    """Return `[rows]`, the probability of each response by WPO, without gradient."""
    aligned = reads["logprobs"].detach() - reads["collision"].detach().log()
    # Values off the mask may not be finite, so they are selected rather than multiplied.
    return torch.exp(rows.row_sums(torch.where(rows["loss_mask"] > 0, aligned, 0.0)) / lengths)


def compute_kto(loss: described.KTOLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `KTOLoss` over one microbatch.

    Args:
        loss: Loss with its beta and weights.
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    responses = ResponseLogprobs.of(reads["logprobs"], rows, uses_reference=True)
    is_good = rows["verdict"] > 0.5
    point = rows["kl"] if loss.reference_point == "batch" else torch.zeros_like(responses.relative)
    distance = responses.relative - point
    distance = torch.where(is_good, distance, -distance)
    doubt = torch.sigmoid(-loss.beta * distance)
    terms = torch.where(is_good, loss.desirable_weight * doubt, loss.undesirable_weight * doubt)
    rewards = loss.beta * responses.relative.detach()
    metrics = {
        "accuracy": MetricSum(right(distance.detach()).sum(), "responses"),
        "reward_desirable": _mean_of(rewards, is_good),
        "reward_undesirable": _mean_of(rewards, ~is_good),
        "kl": MetricSum(point.sum(), "responses"),
    }
    return LossSums({"responses": terms.sum()}, metrics)


def compute_bradley_terry(loss: described.BradleyTerryLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `BradleyTerryLoss` over one microbatch of whole pairs.

    Args:
        loss: Loss with its use of margins and its centering weight.
        reads: `scores` float32 `[rows]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    pairs = Pairs.of(rows)
    chosen, rejected = reads["scores"][pairs.chosen], reads["scores"][pairs.rejected]
    difference = chosen - rejected
    if loss.margin == "subtract":
        difference = difference - rows["margin"][pairs.chosen]
    terms = -F.logsigmoid(difference)
    if loss.margin == "scale":
        terms = rows["margin"][pairs.chosen] * terms
    if loss.center_weight:
        terms = terms + loss.center_weight * (chosen + rejected).square()
    return LossSums({"pairs": terms.sum()}, pairs.metrics(chosen, rejected))


def compute_regression(_loss: described.RegressionLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `RegressionLoss` over one microbatch.

    Args:
        reads: `scores` float32 `[rows]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    scores = reads["scores"]
    metrics = {
        "score": MetricSum(scores.detach().sum(), "responses"),
        "target": MetricSum(rows["verdict"].sum(), "responses"),
    }
    return LossSums({"responses": (scores - rows["verdict"]).square().sum()}, metrics)


def compute_process(_loss: described.ProcessLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `ProcessLoss` over one microbatch.

    Args:
        reads: `values` float32 `[tokens]` and `scores` float32 `[rows]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    labels = rows[described.STEP_LABELS]
    is_end = labels >= 0
    # The value at a token is the score of the row up to the token before it.
    scores = reads["values"].roll(-1).index_copy(0, rows.offsets[1:] - 1, reads["scores"].to(reads["values"].dtype))
    terms = F.binary_cross_entropy_with_logits(scores, labels.clamp(min=0).to(scores.dtype), reduction="none")
    metrics = {
        "accuracy": right((2 * labels - 1) * scores.detach()),
        "score": scores.detach().sigmoid(),
        "target": labels,
    }
    sums = {name: MetricSum(torch.where(is_end, each, 0.0).sum(), "steps") for name, each in metrics.items()}
    return LossSums({"steps": torch.where(is_end, terms, 0.0).sum()}, sums)


def _smoothed(h: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)


def _margins(term: described.PairTerm, pair: Compared) -> Tensor:
    return term.beta * (pair.better - pair.worse)


def _dpo(term: described.DPO, pair: Compared) -> Tensor:
    h = _margins(term, pair) + term.length_penalty * pair.longer
    if term.margin_weight:
        h = h - term.margin_weight * pair.further["margin"]
    return _smoothed(h, term.label_smoothing)


def _robust_dpo(term: described.RobustDPO, pair: Compared) -> Tensor:
    h, smoothing = _margins(term, pair), term.label_smoothing
    return (-(1 - smoothing) * F.logsigmoid(h) + smoothing * F.logsigmoid(-h)) / (1 - 2 * smoothing)


def _ipo(term: described.IPO, pair: Compared) -> Tensor:
    return (pair.better - pair.worse - 1 / (2 * term.beta)).square()


def _hinge(term: described.Hinge, pair: Compared) -> Tensor:
    return F.relu(1 - _margins(term, pair))


def _simpo(term: described.SimPO, pair: Compared) -> Tensor:
    return -F.logsigmoid(_margins(term, pair) - term.gamma)


def _cpo(term: described.CPO, pair: Compared) -> Tensor:
    return -F.logsigmoid(_margins(term, pair))


def _orpo(term: described.ORPO, pair: Compared) -> Tensor:
    return -F.logsigmoid(term.beta * (_log_odds(pair.better) - _log_odds(pair.worse)))


def _log_odds(averaged: Tensor) -> Tensor:
    bounded = averaged.clamp(max=SURE)
    return bounded - torch.log(-torch.expm1(bounded))


def _exo(term: described.EXO, pair: Compared) -> Tensor:
    h, smoothing = _margins(term, pair), term.label_smoothing
    better, worse = F.logsigmoid(h), F.logsigmoid(-h)
    return better.exp() * (better - math.log1p(-smoothing)) + worse.exp() * (worse - math.log(smoothing))


def _nca(term: described.NCA, pair: Compared) -> Tensor:
    better, worse = term.beta * pair.better, term.beta * pair.worse
    return -F.logsigmoid(better) - 0.5 * F.logsigmoid(-better) - 0.5 * F.logsigmoid(-worse)


def _bco(term: described.BCO, pair: Compared) -> Tensor:
    return -F.logsigmoid(term.beta * pair.better) - F.logsigmoid(-term.beta * pair.worse)


def _sppo(term: described.SPPO, pair: Compared) -> Tensor:
    target = 1 / (2 * term.beta)
    return (pair.better - target).square() + (pair.worse + target).square()


def _aot(term: described.AOT, pair: Compared) -> Tensor:
    h = term.beta * (pair.better - pair.worse + pair.further[described.SORTED_SHIFT])
    return _smoothed(h, term.label_smoothing)


def _unpaired_aot(term: described.UnpairedAOT, pair: Compared) -> Tensor:
    return _smoothed(_margins(term, pair), term.label_smoothing)


def _apo_zero(term: described.APOZero, pair: Compared) -> Tensor:
    return torch.sigmoid(-term.beta * pair.better) + torch.sigmoid(term.beta * pair.worse)


def _apo_down(term: described.APODown, pair: Compared) -> Tensor:
    return torch.sigmoid(term.beta * pair.better) + torch.sigmoid(-_margins(term, pair))


def _discopop(term: described.DiscoPOP, pair: Compared) -> Tensor:
    h = _margins(term, pair)
    # The product of both exponentials is finite where one of them is not.
    exponential = torch.exp(F.logsigmoid(h / term.tau) - h)
    return exponential - torch.sigmoid(-h / term.tau) * F.logsigmoid(h)


_TERMS: Mapping[type, Callable[[Any, Compared], Tensor]] = {
    described.DPO: _dpo,
    described.RobustDPO: _robust_dpo,
    described.IPO: _ipo,
    described.Hinge: _hinge,
    described.SimPO: _simpo,
    described.CPO: _cpo,
    described.ORPO: _orpo,
    described.EXO: _exo,
    described.NCA: _nca,
    described.BCO: _bco,
    described.SPPO: _sppo,
    described.AOT: _aot,
    described.UnpairedAOT: _unpaired_aot,
    described.APOZero: _apo_zero,
    described.APODown: _apo_down,
    described.DiscoPOP: _discopop,
}


def _mean(values: Tensor) -> MetricSum:
    return MetricSum(values.detach().sum(), "pairs")


def _mean_of(values: Tensor, selected: Tensor) -> MetricSum:
    return MetricSum(torch.where(selected, values, 0.0).sum(), selected.sum())
