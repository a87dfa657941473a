"""Losses of preference learning, described; computed by `rl_algos.torch.preference`.

Notation, for a response y to a prompt: `logp(y)` is the sum of the policy's logprobs over the assistant's text in
it, `ref(y)` the same sum for the reference policy, `n(y)` the number of those tokens, c the chosen and r the rejected
response of a pair, `h = beta ((logp(c) - ref(c)) - (logp(r) - ref(r)))`, and `logsigmoid` the logarithm of the logistic
function. If logprobs are averaged, `logp(y) / n(y)` and `ref(y) / n(y)` take their place everywhere.

Every term is of one pair (or one response), and the loss is a mean over the pairs of the whole batch: microbatches,
packing and meshes change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rl_algos.losses.mask import loss_mask
from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.model import LOGPROBS, SCORES, Read


@dataclass(frozen=True)
class PairTerm:
    """Base of all terms of a pair. Settings are the fields.

    Args:
        name: Name in configs and of the function in `rl_algos.torch.preference`.
        uses_reference: True if it compares with a reference policy; `beta` is then the weight of the KL divergence.
        averages: True if logprobs are always averaged over tokens.
        weight: Weight of the term; `sft_weight` has its own.
        sft_weight: Weight of the negative log-likelihood of the chosen response that belongs to it.
    """

    name: ClassVar[str]
    uses_reference: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    weight: ClassVar[float] = 1.0
    sft_weight: ClassVar[float] = 0.0
    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta must be positive, got {self.beta}")


@dataclass(frozen=True)
class DPO(PairTerm):
    """`-(1 - s) logsigmoid(h) - s logsigmoid(-h)` (DPO, arXiv:2305.18290; conservative DPO with smoothing s).

    With averaged logprobs it is the length-normalised DPO of Tulu 3 (arXiv:2411.15124). With a length penalty a,
    `h + a (n(c) - n(r))` takes the place of h (R-DPO, arXiv:2403.19159). Policy and reference are equal at the first
    step, and the loss is then ln 2 without the penalty.

    Args:
        beta: Weight of the KL divergence to the reference.
        label_smoothing: S, the share of pairs that are taken to be labelled wrongly; below 0.5.
        length_penalty: A.
    """

    name = "dpo"
    label_smoothing: float = 0.0
    length_penalty: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _smoothing(self.label_smoothing)
        if self.length_penalty < 0:
            raise ValueError(f"length_penalty must be at least 0, got {self.length_penalty}")


@dataclass(frozen=True)
class RobustDPO(PairTerm):
    """`(-(1 - s) logsigmoid(h) + s logsigmoid(-h)) / (1 - 2 s)` (rDPO, arXiv:2403.00409): unbiased if a share s of the
    pairs is labelled wrongly.

    Args:
        beta: See `DPO`.
        label_smoothing: S, below 0.5.
    """

    name = "robust-dpo"
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _smoothing(self.label_smoothing)


@dataclass(frozen=True)
class IPO(PairTerm):
    """`(h / beta - 1 / (2 beta))^2` (IPO, arXiv:2310.12036): the margin has a target, so that certain preferences do
    not drive it to infinity.

    Args:
        beta: The paper's tau.
    """

    name = "ipo"


@dataclass(frozen=True)
class Hinge(PairTerm):
    """`max(0, 1 - h)` (SLiC, arXiv:2305.10425, on the ratios of RSO, arXiv:2309.06657).

    Args:
        beta: The paper's gamma.
    """

    name = "hinge"


@dataclass(frozen=True)
class SimPO(PairTerm):
    """`-logsigmoid(beta (logp(c) / n(c) - logp(r) / n(r)) - gamma)`, without a reference (SimPO, arXiv:2405.14734).

    Args:
        beta: Scale of the reward, which is an averaged logprob.
        gamma: Margin to reach.
    """

    name = "simpo"
    uses_reference = False
    averages = True
    beta: float = 2.0
    gamma: float = 1.0


@dataclass(frozen=True)
class CPO(PairTerm):
    """`-logsigmoid(beta (logp(c) - logp(r)))` plus the negative log-likelihood of the chosen response, without a
    reference (CPO, arXiv:2401.08417).

    Args:
        beta: Scale of the reward.
    """

    name = "cpo"
    uses_reference = False
    sft_weight = 1.0


@dataclass(frozen=True)
class ORPO(PairTerm):
    """`-0.1 logsigmoid(beta (o(c) - o(r)))` plus the mean negative log-likelihood of the chosen response's tokens,
    without a reference (ORPO, arXiv:2403.07691), where `o(y) = logp(y) / n(y) - log(1 - exp(logp(y) / n(y)))` are log
    odds.

    Args:
        beta: Scale of the log odds, 1 in the paper.
    """

    name = "orpo"
    uses_reference = False
    averages = True
    weight = 0.1
    sft_weight = 1.0
    beta: float = 1.0


PAIR_TERMS: Mapping[str, type[PairTerm]] = {kind.name: kind for kind in (DPO, RobustDPO, IPO, Hinge, SimPO, CPO, ORPO)}
"""All terms of a pair by name."""


@dataclass(frozen=True)
class PreferenceLoss:
    """Mean over pairs of `weight term - sft_weight logp(c)`.

    Args:
        term: Term of a pair.
        weight: Weight of the term.
        average_logprobs: Average logprobs over the tokens of a response.
        sft_weight: Weight of the negative log-likelihood of the chosen response.
        sft_average_logprobs: Average it over the response's tokens; otherwise it is their sum.
    """

    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    temperature: ClassVar[float] = 1.0
    term: PairTerm
    weight: float = 1.0
    average_logprobs: bool = False
    sft_weight: float = 0.0
    sft_average_logprobs: bool = False
    implementation: str = "rl_algos.torch.preference:compute_pairs"

    @property
    def columns(self) -> tuple[str, ...]:
        """`pair`, `is_chosen` `[rows]`, `loss_mask` `[tokens]`, and `ref_logprobs` if the term compares with them."""
        reference = ("ref_logprobs",) if self.term.uses_reference else ()
        return (PAIR, "is_chosen", "loss_mask", *reference)

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `pairs`; each shard has whole pairs."""
        loss_mask(batch)
        return {"pairs": num_pairs(batch)}


@dataclass(frozen=True)
class KTOLoss:
    """Mean over responses of `w (1 - sigmoid(d))` (KTO, arXiv:2402.01306), with `d = beta (logp(y) - ref(y) - z)` for a
    desirable response and the negative of it for an undesirable one.

    z is the reference point, an estimate of the KL divergence between policy and reference over the whole batch, which
    no gradient goes through: it comes as the column `kl` `[rows]` and is computed before the step
    (`rl_algos.dpo.algorithm`). The column `verdict` `[rows]` is 1 for a desirable response. At the first step the loss
    is half the mean weight.

    Args:
        beta: Weight of the KL divergence.
        desirable_weight, undesirable_weight: W. The paper keeps the ratio of the two, each times its number of
            responses, between 1 and 4/3.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss_mask", "ref_logprobs", "verdict", "kl")
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    temperature: ClassVar[float] = 1.0
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    implementation: str = "rl_algos.torch.preference:compute_kto"

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `responses`."""
        loss_mask(batch)
        return {"responses": float(len(batch))}


def num_pairs(batch: Batch) -> float:
    """Count the pairs of a batch of whole pairs.

    Raises:
        ValueError: If a pair is torn apart, or has not one chosen and one rejected response.
    """
    _, index = np.unique(batch.array(PAIR), return_inverse=True)
    chosen = batch.array("is_chosen") > 0
    is_whole = (np.bincount(index[chosen], minlength=index.max(initial=-1) + 1) == 1) & (np.bincount(index) == 2)
    if not np.all(is_whole):
        wrong = f"{np.sum(~is_whole)} of {len(is_whole)} pairs"
        raise ValueError(f"{wrong} do not have exactly one chosen and one rejected response")
    return float(len(is_whole))


def _smoothing(share: float) -> None:
    if not 0 <= share < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {share}")


MarginUse = Literal["ignore", "subtract", "scale"]


@dataclass(frozen=True)
class BradleyTerryLoss:
    """Mean over pairs of `-logsigmoid(s(c) - s(r))` (Bradley-Terry; arXiv:2203.02155).

    Args:
        margin: Use of the margin m of a pair: with `subtract` the term is `-logsigmoid(s(c) - s(r) - m)`
            (Llama 2, arXiv:2307.09288), with `scale` it is `-m logsigmoid(s(c) - s(r))` (HelpSteer2-Preference,
            arXiv:2410.01257).
        center_weight: Weight of `(s(c) + s(r))^2`, which keeps scores near 0 (arXiv:2312.09244).
    """

    reads: ClassVar[tuple[Read, ...]] = (SCORES,)
    temperature: ClassVar[float] = 1.0
    margin: MarginUse = "ignore"
    center_weight: float = 0.0
    implementation: str = "rl_algos.torch.preference:compute_bradley_terry"

    @property
    def columns(self) -> tuple[str, ...]:
        """`pair`, `is_chosen` and, if it counts, `margin` `[rows]`."""
        return (PAIR, "is_chosen") if self.margin == "ignore" else (PAIR, "is_chosen", "margin")

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `pairs`; each shard has whole pairs."""
        return {"pairs": num_pairs(batch)}


@dataclass(frozen=True)
class RegressionLoss:
    """Mean over responses of `(s(y) - target)^2`, with the target in the column `verdict` `[rows]`."""

    columns: ClassVar[tuple[str, ...]] = ("verdict",)
    reads: ClassVar[tuple[Read, ...]] = (SCORES,)
    temperature: ClassVar[float] = 1.0
    implementation: str = "rl_algos.torch.preference:compute_regression"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `responses`."""
        return {"responses": float(len(batch))}
