"""Losses of distillation, described: divergence from a teacher at its most likely tokens or over whole vocabularies,
and the likelihood of spans for a teacher with other tokens; computed by `rl_algos.torch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.losses.mask import LossByToken
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS, HeadFiles, Read, divergences_from, logprobs_at
from rl_core.model import MIN_TAIL as MIN_TAIL
from rl_core.rollouts.group import LOSS_MASK

KLName = Literal["forward", "reverse", "mixed", "jensen_shannon"]

TEACHER_IDS = "teacher_ids"
"""Column of the teacher's most likely tokens, int32 `[tokens, k]`; -1 where there are fewer."""

TEACHER_LOGPROBS = "teacher_logprobs"
"""Column of their logprobs under the teacher, float32 `[tokens, k]`."""

FORWARD_KL, REVERSE_KL = "forward_kl", "reverse_kl"
TEACHER_TAIL, STUDENT_TAIL = "teacher_tail", "student_tail"
METRICS = (FORWARD_KL, REVERSE_KL, TEACHER_TAIL, STUDENT_TAIL)
"""Metrics of the loss, means over the tokens under the mask: KL(teacher || student), KL(student || teacher), and the
mass of each beyond the teacher's most likely tokens."""

NLL = "nll"
"""The mean negative log-likelihood of the text, if it is learned as well."""

TEACHER_HIDDEN = "teacher_hidden"
"""Column of the teacher's hidden states, float32 `[tokens, hidden]`; zeros fill the rows of the smaller of several."""

TEACHER_NUMBER = "teacher_number"
"""Column of the number of each token's teacher among the heads of the loss, int32 `[tokens]`."""

TEACHER_TOKEN_LOGPROBS = "teacher_token_logprobs"
"""Column of the teacher's logprobs of the tokens that are there, float32 `[tokens]`."""

STATE_WEIGHTS = "state_weights"
"""Column of the importance weights of the tokens before each token, float32 `[tokens]`."""

HEAD_ERROR = "teacher_head_error"
"""Metric: the largest difference of the teacher's own logprob of a token that is there from the one that the student's
ranks compute from its hidden state and the head in its files."""


@dataclass(frozen=True)
class Divergence:
    """How far the student's distribution q of the next token is from the teacher's p.

    Both are taken over k + 1 outcomes: the teacher's k most likely tokens, one by one, and the tail, all others
    together: `p_tail = 1 - sum p`, `q_tail = 1 - sum q`. So a student that puts mass outside the teacher's tokens pays
    for it, and nothing is renormalised. The value is a lower bound of the divergence over the whole vocabulary, and
    equal to it if k is the vocabulary's size.

    - `forward`: `KL(p || q) = sum p (log p - log q)`: covers all that the teacher may say (Hinton et al.,
      arXiv:1503.02531).
    - `reverse`: `KL(q || p) = sum q (log q - log p)`: writes only what the teacher may write (MiniLLM,
    arXiv:2306.08543).
    - `mixed`: `mixed_weight KL(p || q) + (1 - mixed_weight) KL(q || p)`.
    - `jensen_shannon`: with `m = beta p + (1 - beta) q`, `beta KL(p || m) + (1 - beta) KL(q || m)`, bounded (GKD,
      arXiv:2306.13649). Divided by beta it nears the forward KL as beta nears 0; divided by `1 - beta`, the reverse KL
      as beta nears 1.

    Args:
        name: One of these.
        mixed_weight: Weight of the forward KL, from 0 to 1.
        beta: The teacher's weight in the mixture, between 0 and 1.
    """

    name: KLName = "forward"
    mixed_weight: float = 0.5
    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.mixed_weight <= 1:
            raise ValueError(f"mixed_weight must be from 0 to 1, got {self.mixed_weight}")
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta must be above 0 and below 1, got {self.beta}; the divergence is 0 at both ends. Use forward or "
                "reverse instead"
            )


_FORWARD = Divergence()


@dataclass(frozen=True)
class LossOfDivergences(LossByToken):
    """Base of the losses that compare the distributions of single tokens.

    Args:
        divergence: Divergence, with its weights.
        nll_weight: Weight of the negative log-likelihood of the text itself.
        temperature: Divides the student's logits; the teacher's columns must have the same temperature.
        importance: Correction for tokens that other weights sampled; None for none.
    """

    divergence: Divergence = _FORWARD
    nll_weight: float = 0.0
    temperature: float = 1.0
    importance: ImportanceCorrection | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """The column of importance weights, if there is a correction."""
        return () if self.importance is None else (STATE_WEIGHTS,)

    @property
    def denominator(self) -> str:
        """The total that divides the divergences."""
        normalizes = self.importance is not None and self.importance.batch_normalize
        return "importance_weights" if normalizes else "tokens"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `tokens` under the mask, and their `importance_weights` if these divide the divergences."""
        totals = dict(super().totals(batch))
        if self.denominator != "tokens":
            is_learned = batch.ragged(LOSS_MASK).values > 0
            totals[self.denominator] = float(batch.ragged(STATE_WEIGHTS).values[is_learned].sum(dtype=np.float64))
        return totals


@dataclass(frozen=True)
class DistillationLoss(LossOfDivergences):
    """The mean divergence over the tokens under `loss_mask`, plus `nll_weight` times their mean `-log q`.

    The divergence at token i compares the distributions of token i, given the tokens before it. All logits, of the
    student and of the teacher, are divided by one temperature; the loss is not multiplied by its square, as in some
    other implementations. With importance weights, the divergence at token i has the weight of the tokens before it.
    """

    implementation: str = "rl_algos.torch.distillation:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 `[tokens]`, the teacher's tokens and logprobs, and importance weights."""
        return ("loss_mask", TEACHER_IDS, TEACHER_LOGPROBS, *self.weights)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The student's logprobs at the teacher's tokens, and at the tokens of the text if they are learned as well."""
        return (logprobs_at(TEACHER_IDS), LOGPROBS) if self.nll_weight else (logprobs_at(TEACHER_IDS),)


@dataclass(frozen=True, kw_only=True)
class WholeDistillationLoss(LossOfDivergences):
    """A `DistillationLoss` over all tokens that student and teacher share, however many there are.

    Distributions of a large vocabulary are too large to travel. Teachers send their hidden states, and the student's
    ranks read the teachers' heads from their files and compute their distributions, a chunk of tokens at a time. Tokens
    that only one of student and teacher has are the tail.

    Args:
        heads: Heads of the teachers, by their numbers.
        vocabulary: Number of tokens that student and teachers share.
    """

    heads: tuple[HeadFiles, ...]
    vocabulary: int
    implementation: str = "rl_algos.torch.distillation:compute_whole"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 `[tokens]`, the teachers' hidden states, numbers and logprobs, and importance weights."""
        return ("loss_mask", TEACHER_HIDDEN, TEACHER_NUMBER, TEACHER_TOKEN_LOGPROBS, *self.weights)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The divergences, and the student's logprobs of the text if they are learned as well."""
        read = divergences_from(
            self.heads, TEACHER_HIDDEN, TEACHER_NUMBER, below=self.vocabulary, beta=self.divergence.beta
        )
        return (read, LOGPROBS) if self.nll_weight else (read,)


SPANS = "spans"
"""Column uint8 `[tokens]`: 1 on tokens of a span, 2 on the last token of each, 0 on tokens of none."""

SPAN_LOGPROBS = "span_logprobs"
"""Column float32 `[tokens]`: at the last token of a span its logprob by the teacher; 0 elsewhere."""

LOGPROB_GAP, TOKENS_PER_SPAN = "span_logprob_gap", "tokens_per_span"
SPAN_METRICS = (LOGPROB_GAP, TOKENS_PER_SPAN)
"""Metrics of the loss, means over spans: the difference of the logprobs by teacher and student, and the number of the
student's tokens."""


@dataclass(frozen=True)
class SpanLoss:
    """Approximate likelihood matching (ALM, arXiv:2503.20083), averaged over the spans of the batch.

    A span is a piece of text that both tokenizers make of whole tokens; its likelihood is the product of its tokens'
    likelihoods. With P and Q the likelihoods by teacher and student, each to the power of `1 / tau`, a span costs the
    KL divergence of two outcomes, this text or another: `P (log P - log Q) + (1 - P) (log (1 - P) - log (1 - Q))`.

    Args:
        tau: Values above 1 distinguish unlikely spans.
        temperature: Divides the student's logits; the teacher's column must have the same temperature.
    """

    columns: ClassVar[tuple[str, ...]] = (SPANS, SPAN_LOGPROBS)
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    tau: float = 100.0
    temperature: float = 1.0
    implementation: str = "rl_algos.torch.distillation:compute_spans"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `spans` of the batch."""
        return {"spans": float(np.count_nonzero(batch.ragged(SPANS).values == 2))}
