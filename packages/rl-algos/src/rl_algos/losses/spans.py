"""Likelihood of spans of text, for a teacher with other tokens than the student; computed by `rl_algos.torch.spans`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS, Read

SPANS = "spans"
"""Column uint8 `[tokens]`: 1 on tokens of a span, 2 on the last token of each, 0 on tokens of none."""

SPAN_LOGPROBS = "span_logprobs"
"""Column float32 `[tokens]`: at the last token of a span its logprob by the teacher; 0 elsewhere."""

LOGPROB_GAP, TOKENS_PER_SPAN = "span_logprob_gap", "tokens_per_span"
METRICS = (LOGPROB_GAP, TOKENS_PER_SPAN)
"""Metrics of the loss, means over spans: the difference of the logprobs by teacher and student, and the number of the
student's tokens."""


@dataclass(frozen=True)
class SpanLoss:
    """Approximate likelihood matching (ALM, arXiv:2503.20083), averaged over the spans of the batch.

    A span is a piece of text that both tokenizers make of whole tokens; its likelihood is the product of those of its
    tokens. With P and Q the likelihoods by teacher and student, each to the power of `1 / tau`, a span costs the KL
    divergence of two outcomes, this text or another: `P (log P - log Q) + (1 - P) (log (1 - P) - log (1 - Q))`.

    Args:
        tau: Above 1 it tells unlikely spans apart.
        temperature: Divides the student's logits; that of the teacher's column must be the same.
    """

    columns: ClassVar[tuple[str, ...]] = (SPANS, SPAN_LOGPROBS)
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    tau: float = 100.0
    temperature: float = 1.0
    implementation: str = "rl_algos.torch.spans:compute"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`spans` of the batch."""
        return {"spans": float(np.count_nonzero(batch.ragged(SPANS).values == 2))}
