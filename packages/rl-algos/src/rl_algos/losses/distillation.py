"""Divergence of a student from a teacher at the teacher's most likely tokens, or over whole vocabularies, described;
computed by `rl_algos.torch.distillation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_algos.losses.mask import num_masked
from rl_core.data.batch import Batch
from rl_core.model import LEAST_TAIL as LEAST_TAIL
from rl_core.model import LOGPROBS, HeadFiles, Read, divergences_from, logprobs_at

KLName = Literal["forward", "reverse", "mixed", "jensen_shannon"]

TEACHER_IDS = "teacher_ids"
"""Column of the teacher's most likely tokens, int32 `[tokens, k]`; -1 where there are fewer."""

TEACHER_LOGPROBS = "teacher_logprobs"
"""Column of their logprobs by the teacher, float32 `[tokens, k]`."""

FORWARD_KL, REVERSE_KL = "forward_kl", "reverse_kl"
TEACHER_TAIL, STUDENT_TAIL = "teacher_tail", "student_tail"
METRICS = (FORWARD_KL, REVERSE_KL, TEACHER_TAIL, STUDENT_TAIL)
"""Metrics of the loss, means over the tokens under the mask: KL(teacher || student), KL(student || teacher), and the
mass of each beyond the teacher's most likely tokens."""

NLL = "nll"
"""The mean negative log-likelihood of the text, if it is learned as well."""

TEACHER_HIDDEN = "teacher_hidden"
"""Column of the teacher's hidden states, float32 `[tokens, hidden]`; zeros follow those of the smaller of several."""

TEACHER_NUMBER = "teacher_number"
"""Column of the number of each token's teacher among the heads of the loss, int32 `[tokens]`."""

TEACHER_TOKEN_LOGPROBS = "teacher_token_logprobs"
"""Column of the teacher's logprobs of the tokens that are there, float32 `[tokens]`."""

HEAD_ERROR = "teacher_head_error"
"""Metric: the largest difference of the teacher's own logprob of a token that is there from the one that the student's
ranks compute from its hidden state and the head in its files."""


@dataclass(frozen=True)
class Divergence:
    """How far the student's distribution q of the next token is from the teacher's p.

    Both are taken over k + 1 outcomes: the teacher's k most likely tokens, each by itself, and the tail, all others
    together: `p_tail = 1 - sum p`, `q_tail = 1 - sum q`. So a student that puts mass outside the teacher's tokens pays
    for it, and nothing is renormalised. The value is never above that over the whole vocabulary, and equal to it if k
    is the vocabulary's size.

    - `forward`: `KL(p || q) = sum p (log p - log q)`: covers all that the teacher may say (Hinton et al.,
      arXiv:1503.02531).
    - `reverse`: `KL(q || p) = sum q (log q - log p)`: says only what the teacher may say (MiniLLM, arXiv:2306.08543).
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
class DistillationLoss:
    """The mean divergence over the tokens under `loss_mask`, plus `nll_weight` times their mean `-log q`.

    The divergence at token i is that of the distributions of token i, given the tokens before it. All logits, the
    student's and those that the teacher's columns come from, are divided by one temperature; the loss is not multiplied
    by its square, as some do.

    Args:
        divergence: Which, and its weights.
        nll_weight: Weight of the negative log-likelihood of the text itself.
        temperature: Divides the student's logits; that of the teacher's columns must be the same.
    """

    divergence: Divergence = _FORWARD
    nll_weight: float = 0.0
    temperature: float = 1.0
    implementation: str = "rl_algos.torch.distillation:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 `[tokens]`, and the teacher's tokens and logprobs."""
        return ("loss_mask", TEACHER_IDS, TEACHER_LOGPROBS)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The student's logprobs at the teacher's tokens, and at those of the text if they are learned as well."""
        return (logprobs_at(TEACHER_IDS), LOGPROBS) if self.nll_weight else (logprobs_at(TEACHER_IDS),)

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` under the mask."""
        return {"tokens": num_masked(batch)}


@dataclass(frozen=True)
class WholeDistillationLoss:
    """A `DistillationLoss` over all tokens that student and teacher share, however many there are.

    Distributions of a large vocabulary are too large to travel. Teachers send their hidden states, and the student's
    ranks read the teachers' heads from their files and compute their distributions, a chunk of tokens at a time. Tokens
    that only one of student and teacher has are the tail.

    Args:
        heads: Heads of the teachers, by their numbers.
        vocabulary: Number of tokens that student and teachers share.
        divergence, nll_weight, temperature: See `DistillationLoss`.
    """

    heads: tuple[HeadFiles, ...]
    vocabulary: int
    divergence: Divergence = _FORWARD
    nll_weight: float = 0.0
    temperature: float = 1.0
    implementation: str = "rl_algos.torch.distillation:compute_whole"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 `[tokens]`, and the teachers' hidden states, numbers and logprobs."""
        return ("loss_mask", TEACHER_HIDDEN, TEACHER_NUMBER, TEACHER_TOKEN_LOGPROBS)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The divergences, and the student's logprobs of the text if they are learned as well."""
        read = divergences_from(
            self.heads, TEACHER_HIDDEN, TEACHER_NUMBER, below=self.vocabulary, beta=self.divergence.beta
        )
        return (read, LOGPROBS) if self.nll_weight else (read,)

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` under the mask."""
        return {"tokens": num_masked(batch)}
