"""The computations of `rl_algos.losses.preference`."""

from __future__ import annotations

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
        relative: The same minus the logprobs of the reference, or as they are if there is none.
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
        lengths = rows.row_sums(mask.to(logprobs.dtype)).clamp(min=1)
        return cls(rows.row_sums(own), rows.row_sums(relative), lengths)

    def select(self, index: Tensor) -> ResponseLogprobs:
        """Return the given rows."""
        return ResponseLogprobs(self.logprobs[index], self.relative[index], self.lengths[index])

    def rewards(self, *, averages: bool) -> Tensor:
        """Return the rewards that a term compares, before scaling."""
        return self.relative / self.lengths if averages else self.relative


def compute_pairs(loss: described.PreferenceLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `PreferenceLoss` over one microbatch of whole pairs.

    Args:
        loss: Loss with its term and weights.
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    term, pairs = loss.term, Pairs.of(rows)
    responses = ResponseLogprobs.of(reads["logprobs"], rows, uses_reference=term.uses_reference)
    chosen, rejected = responses.select(pairs.chosen), responses.select(pairs.rejected)
    averages = loss.average_logprobs or term.averages
    better, worse = (side.rewards(averages=averages) for side in (chosen, rejected))
    terms = _TERMS[type(term)](term, better, worse, chosen.lengths - rejected.lengths)
    objective = loss.weight * terms.sum()
    metrics = {"preference_loss": _mean(terms)}
    if loss.sft_weight:
        nll = -(chosen.logprobs / chosen.lengths if loss.sft_average_logprobs else chosen.logprobs)
        objective = objective + loss.sft_weight * nll.sum()
        metrics["sft_loss"] = _mean(nll)
    metrics |= pairs.metrics(term.beta * better, term.beta * worse)
    metrics |= {"logprob_chosen": _mean(chosen.logprobs), "logprob_rejected": _mean(rejected.logprobs)}
    return LossSums({"pairs": objective}, metrics)


def compute_kto(loss: described.KTOLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of a `KTOLoss` over one microbatch.

    Args:
        loss: Loss with its beta and weights.
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    responses = ResponseLogprobs.of(reads["logprobs"], rows, uses_reference=True)
    is_good = rows["verdict"] > 0.5
    distance = responses.relative - rows["kl"]
    distance = torch.where(is_good, distance, -distance)
    doubt = torch.sigmoid(-loss.beta * distance)
    terms = torch.where(is_good, loss.desirable_weight * doubt, loss.undesirable_weight * doubt)
    rewards = loss.beta * responses.relative.detach()
    metrics = {
        "accuracy": MetricSum(right(distance.detach()).sum(), "responses"),
        "reward_desirable": _mean_of(rewards, is_good),
        "reward_undesirable": _mean_of(rewards, ~is_good),
        "kl": MetricSum(rows["kl"].sum(), "responses"),
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


def _dpo(term: described.DPO, better: Tensor, worse: Tensor, longer: Tensor) -> Tensor:
    h = term.beta * (better - worse) + term.length_penalty * longer
    smoothing = term.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)


def _robust_dpo(term: described.RobustDPO, better: Tensor, worse: Tensor, _longer: Tensor) -> Tensor:
    h, smoothing = term.beta * (better - worse), term.label_smoothing
    return (-(1 - smoothing) * F.logsigmoid(h) + smoothing * F.logsigmoid(-h)) / (1 - 2 * smoothing)


def _ipo(term: described.IPO, better: Tensor, worse: Tensor, _longer: Tensor) -> Tensor:
    return (better - worse - 1 / (2 * term.beta)).square()


def _hinge(term: described.Hinge, better: Tensor, worse: Tensor, _longer: Tensor) -> Tensor:
    return F.relu(1 - term.beta * (better - worse))


def _simpo(term: described.SimPO, better: Tensor, worse: Tensor, _longer: Tensor) -> Tensor:
    return -F.logsigmoid(term.beta * (better - worse) - term.gamma)


def _cpo(term: described.CPO, better: Tensor, worse: Tensor, _longer: Tensor) -> Tensor:
    return -F.logsigmoid(term.beta * (better - worse))


def _orpo(term: described.ORPO, better: Tensor, worse: Tensor, _longer: Tensor) -> Tensor:
    return -F.logsigmoid(term.beta * (_log_odds(better) - _log_odds(worse)))


def _log_odds(averaged: Tensor) -> Tensor:
    bounded = averaged.clamp(max=SURE)
    return bounded - torch.log(-torch.expm1(bounded))


_TERMS: Mapping[type, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    described.DPO: _dpo,
    described.RobustDPO: _robust_dpo,
    described.IPO: _ipo,
    described.Hinge: _hinge,
    described.SimPO: _simpo,
    described.CPO: _cpo,
    described.ORPO: _orpo,
}


def _mean(values: Tensor) -> MetricSum:
    return MetricSum(values.detach().sum(), "pairs")


def _mean_of(values: Tensor, selected: Tensor) -> MetricSum:
    return MetricSum(torch.where(selected, values, 0.0).sum(), selected.sum())
