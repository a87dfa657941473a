"""Losses of preference learning, described; computed by `rl_algos.torch.preference`.

Notation, for a response y to a prompt: `logp(y)` is the sum of the policy's logprobs over the assistant's text in
it, `ref(y)` the same sum for the reference policy, `n(y)` the number of those tokens, c the chosen and r the rejected
response of a pair, `h = beta ((logp(c) - ref(c)) - (logp(r) - ref(r)))`, and `logsigmoid` the logarithm of the logistic
function. If logprobs are averaged, `logp(y) / n(y)` and `ref(y) / n(y)` take their place everywhere. `d(y)` is
`logp(y) - ref(y)`, so that `h = beta (d(c) - d(r))`.

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
from rl_core.model import COLLISION, LOGPROBS, SCORES, VALUES, Read

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
"""Names of divergences between policy and reference, as in TRL."""

LENGTH_WEIGHTS = "length_weights"
"""Column of the weights of a response's tokens, float32 `[tokens]`; see `PreferenceLoss.ld_alpha`."""

SORTED_SHIFT = "sorted_shift"
"""Column that AOT adds to the difference of a pair, float32 `[rows]`; see `AOT`."""


@dataclass(frozen=True)
class PairTerm:
    """Base of all terms of a pair. Settings are the fields.

    Args:
        name: Name in configs and of the function in `rl_algos.torch.preference`.
        uses_reference: True if it compares with a reference policy; `beta` is then the weight of the KL divergence.
        averages: True if logprobs are always averaged over tokens.
        is_of_difference: True if it depends on `d(c) - d(r)` only, so that another f-divergence may replace the
            reverse KL divergence.
        sorts: Rows that are sorted by their logprobs over the whole batch before the step: the `margins` of pairs, or
            the `responses`. None if the term looks at one pair.
        weight: Weight of the term; `sft_weight` has its own.
        sft_weight: Weight of the negative log-likelihood of the chosen response that belongs to it.
    """

    name: ClassVar[str]
    uses_reference: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    is_of_difference: ClassVar[bool] = False
    sorts: ClassVar[Literal["margins", "responses"] | None] = None
    weight: ClassVar[float] = 1.0
    sft_weight: ClassVar[float] = 0.0
    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta must be positive, got {self.beta}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns `[rows]` that it needs in addition to the columns of every pair."""
        return ()


@dataclass(frozen=True)
class DPO(PairTerm):
    """`-(1 - s) logsigmoid(h) - s logsigmoid(-h)` (DPO, arXiv:2305.18290; conservative DPO with smoothing s).

    With averaged logprobs it is the length-normalised DPO of Tulu 3 (arXiv:2411.15124). With a length penalty a,
    `h + a (n(c) - n(r))` takes the place of h (R-DPO, arXiv:2403.19159), and with a margin weight w `h - w m`, with m
    the margin of the pair in the data (DPO with an offset, arXiv:2402.10571). Policy and reference are equal at the
    first step, and the loss is then ln 2 without penalty and margin.

    Args:
        beta: Weight of the KL divergence to the reference.
        label_smoothing: S, the share of pairs that are taken to be labelled wrongly; below 0.5.
        length_penalty: A.
        margin_weight: W; above 0 the data must have a margin for each pair, or scores.
    """

    name = "dpo"
    is_of_difference = True
    label_smoothing: float = 0.0
    length_penalty: float = 0.0
    margin_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _smoothing(self.label_smoothing)
        for name in ("length_penalty", "margin_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("margin",) if self.margin_weight else ()


@dataclass(frozen=True)
class RobustDPO(PairTerm):
    """`(-(1 - s) logsigmoid(h) + s logsigmoid(-h)) / (1 - 2 s)` (rDPO, arXiv:2403.00409): unbiased if a share s of the
    pairs is labelled wrongly.

    Args:
        beta: See `DPO`.
        label_smoothing: S, below 0.5.
    """

    name = "robust-dpo"
    is_of_difference = True
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
    is_of_difference = True


@dataclass(frozen=True)
class Hinge(PairTerm):
    """`max(0, 1 - h)` (SLiC, arXiv:2305.10425, on the ratios of RSO, arXiv:2309.06657).

    Args:
        beta: The paper's gamma.
    """

    name = "hinge"
    is_of_difference = True


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


@dataclass(frozen=True)
class EXO(PairTerm):
    """`q (log q - log(1 - s)) + (1 - q) (log(1 - q) - log s)` with q = sigmoid(h): the KL divergence from the policy's
    preference to that of the labels, whose direction is the reverse of DPO's (EXO-pref, arXiv:2402.00856, equation 16).

    Args:
        beta: See `DPO`.
        label_smoothing: S, above 0 and below 0.5; 0.001 in the paper.
    """

    name = "exo"
    is_of_difference = True
    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be above 0 and below 0.5, got {self.label_smoothing}")


@dataclass(frozen=True)
class NCA(PairTerm):
    """`-logsigmoid(beta d(c)) - (logsigmoid(-beta d(c)) + logsigmoid(-beta d(r))) / 2`: the chosen response does not
    become less likely, as it may with DPO (NCA on pairs, arXiv:2402.05369).

    Args:
        beta: See `DPO`.
    """

    name = "nca"


@dataclass(frozen=True)
class BCO(PairTerm):
    """`-logsigmoid(beta d(c)) - logsigmoid(-beta d(r))`: a classifier of good and bad responses (the pairwise form of
    BCO, arXiv:2404.04656, without its reward shift).

    Args:
        beta: See `DPO`.
    """

    name = "bco"


@dataclass(frozen=True)
class SPPO(PairTerm):
    """`(d(c) - 1 / (2 beta))^2 + (d(r) + 1 / (2 beta))^2` (SPPO with probabilities of 1 and 0, arXiv:2405.00675).

    Args:
        beta: The inverse of the paper's eta.
    """

    name = "sppo"


@dataclass(frozen=True)
class AOT(PairTerm):
    """`-(1 - s) logsigmoid(beta (u - v)) - s logsigmoid(-beta (u - v))`, with `u = logp(c) - logp(r)` of a pair and v
    the number of the same rank among `ref(c) - ref(r)` of all pairs of the batch: the policy's margins dominate the
    reference's as a distribution (AOT, arXiv:2406.05882). A validation sorts each of its batches.

    The ranks are known before the step, in which the policy does not change: the column `sorted_shift` has
    `(ref(c) - ref(r)) - v`.

    Args:
        beta: See `DPO`.
        label_smoothing: S, below 0.5.
    """

    name = "aot"
    sorts = "margins"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _smoothing(self.label_smoothing)

    @property
    def columns(self) -> tuple[str, ...]:
        return (SORTED_SHIFT,)


@dataclass(frozen=True)
class UnpairedAOT(PairTerm):
    """`-(1 - s) logsigmoid(h) - s logsigmoid(-h)` of pairs that are formed anew: the chosen response with the k-th
    largest `d(c)` of the batch and the rejected response with the k-th largest `d(r)` (AOT without pairs,
    arXiv:2406.05882). Its metrics are of these pairs.

    Args:
        beta: See `DPO`.
        label_smoothing: S, below 0.5.
    """

    name = "aot-unpaired"
    sorts = "responses"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _smoothing(self.label_smoothing)


@dataclass(frozen=True)
class APOZero(PairTerm):
    """`1 - sigmoid(beta d(c)) + sigmoid(beta d(r))`, for chosen responses that are better than the policy's own
    (APO-zero, arXiv:2408.06266, equation 7).

    Args:
        beta: See `DPO`.
    """

    name = "apo-zero"


@dataclass(frozen=True)
class APODown(PairTerm):
    """`sigmoid(beta d(c)) + 1 - sigmoid(h)`, for chosen responses that are worse than the policy's own: both become
    less likely, the rejected one more so (APO-down, arXiv:2408.06266, equation 8).

    Args:
        beta: See `DPO`.
    """

    name = "apo-down"


@dataclass(frozen=True)
class DiscoPOP(PairTerm):
    """`-(1 - m) logsigmoid(h) + m exp(-h)` with `m = sigmoid(h / tau)` (DiscoPOP, arXiv:2406.08414, equation 5).

    With tau below 0.102 the loss increases with h at 0, and pairs that the policy gets wrong stay wrong.

    Args:
        beta: See `DPO`.
        tau: Width of the change from one part to the other.
    """

    name = "discopop"
    is_of_difference = True
    tau: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau must be above 0 and at most 1, got {self.tau}")


PAIR_TERMS: Mapping[str, type[PairTerm]] = {
    kind.name: kind
    for kind in (
        *(DPO, RobustDPO, IPO, Hinge, SimPO, CPO, ORPO),
        *(EXO, NCA, BCO, SPPO, AOT, UnpairedAOT, APOZero, APODown, DiscoPOP),
    )
}
"""All terms of a pair by name."""


@dataclass(frozen=True)
class AddedTerm:
    """A further term of a `PreferenceLoss`, with its weight.

    Args:
        term: Term of a pair, with the beta of the loss.
        weight: Weight of the term.
        average_logprobs: Average logprobs over the tokens of a response.
    """

    term: PairTerm
    weight: float
    average_logprobs: bool = False


@dataclass(frozen=True)
class PreferenceLoss:
    """Mean over pairs of `weight term - sft_weight logp(c)`, and of further terms (a mixture as in MPO,
    arXiv:2411.10442).

    `d(y)` is the derivative of the KL divergence by the ratio of policy and reference. With another f-divergence it is
    `f'(exp(d(y)))` (f-DPO, arXiv:2309.16240): `1 - exp(-d)` of the forward KL, `log 2 + logsigmoid(d)` of the
    Jensen-Shannon and `(exp((alpha - 1) d) - 1) / (alpha - 1)` of the alpha divergence. Exponents are bounded by 40.

    Args:
        term: Term of a pair.
        weight: Weight of the term.
        average_logprobs: Average logprobs over the tokens of a response.
        sft_weight: Weight of the negative log-likelihood of the chosen response.
        sft_average_logprobs: Average it over the response's tokens; otherwise it is their sum.
        added: Further terms.
        divergence: F-divergence from the reference.
        alpha: Alpha of the alpha divergence; the limit of 1 is the reverse KL.
        ld_alpha: Factor of the logprobs of tokens beyond the length of the shorter response of a pair (LD-DPO,
            arXiv:2409.06411); None for no weights. The column `length_weights` has it.
        weighs_by_policy: Multiply the terms of a pair by the policy's probability of both responses (WPO,
            arXiv:2406.11827, equation 2): each the exponential of the mean over its tokens of
            `logp - log(sum of squared probabilities)`. No gradient goes through it.
    """

    temperature: ClassVar[float] = 1.0
    term: PairTerm
    weight: float = 1.0
    average_logprobs: bool = False
    sft_weight: float = 0.0
    sft_average_logprobs: bool = False
    added: tuple[AddedTerm, ...] = ()
    divergence: FDivergence = "reverse_kl"
    alpha: float = 0.5
    ld_alpha: float | None = None
    weighs_by_policy: bool = False
    implementation: str = "rl_algos.torch.preference:compute_pairs"

    @property
    def reads(self) -> tuple[Read, ...]:
        """Logprobs and, to weigh pairs, the sum of squared probabilities."""
        return (LOGPROBS, COLLISION) if self.weighs_by_policy else (LOGPROBS,)

    @property
    def columns(self) -> tuple[str, ...]:
        """`pair`, `is_chosen` `[rows]`, `loss_mask` `[tokens]`, `ref_logprobs` if a term compares with them, and the
        columns of the terms."""
        terms = (self.term, *(each.term for each in self.added))
        reference = ("ref_logprobs",) if any(term.uses_reference for term in terms) else ()
        weights = () if self.ld_alpha is None else (LENGTH_WEIGHTS,)
        further = dict.fromkeys(column for term in terms for column in term.columns)
        return (PAIR, "is_chosen", "loss_mask", *reference, *weights, *further)

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
    is half the mean weight. A reference point of zero gives APO-zero on single responses (arXiv:2408.06266).

    Args:
        beta: Weight of the KL divergence.
        desirable_weight, undesirable_weight: W. The paper keeps the ratio of the two, each times its number of
            responses, between 1 and 4/3.
        reference_point: `batch` for the estimate, `zero` for z = 0.
    """

    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    temperature: ClassVar[float] = 1.0
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_point: Literal["batch", "zero"] = "batch"
    implementation: str = "rl_algos.torch.preference:compute_kto"

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask`, `ref_logprobs` `[tokens]`, `verdict` and, for the estimate, `kl` `[rows]`."""
        return ("loss_mask", "ref_logprobs", "verdict", *(("kl",) if self.reference_point == "batch" else ()))

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


STEP_LABELS = "step_labels"
"""Column of the labels of steps, float32 `[tokens]`: from 0 to 1 at the last token of a step, -1 at other tokens."""


@dataclass(frozen=True)
class ProcessLoss:
    """Mean over steps of `-y logsigmoid(s) - (1 - y) logsigmoid(-s)`, with the score s of the response up to the end of
    a step and its label y in the column `step_labels` (process reward models, arXiv:2305.20050)."""

    columns: ClassVar[tuple[str, ...]] = (STEP_LABELS,)
    reads: ClassVar[tuple[Read, ...]] = (VALUES, SCORES)
    temperature: ClassVar[float] = 1.0
    implementation: str = "rl_algos.torch.preference:compute_process"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `steps`."""
        return {"steps": float(np.sum(batch.ragged(STEP_LABELS).values >= 0))}
