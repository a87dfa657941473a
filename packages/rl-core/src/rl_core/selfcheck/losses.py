"""Small real losses for tests: every kind of read, every kind of total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rl_core.data.batch import Batch
from rl_core.model import ENTROPY, LOGPROBS, SCORES, VALUES, Read, logprobs_at, topk


@dataclass(frozen=True)
class TokenLoss:
    """Weighted negative logprobs over tokens, minus other reads, plus a term per sequence.

    The other reads are entropy, the second most likely logprob and the logprobs of ids in the column `candidates`.
    """

    temperature: float = 1.0
    entropy_weight: float = 0.1
    topk_weight: float = 0.05
    candidates_weight: float = 0.03
    sequence_weight: float = 0.3
    columns: ClassVar[tuple[str, ...]] = ("loss_mask", "weights")
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS, ENTROPY, topk(2), logprobs_at("candidates"))
    implementation: ClassVar[str] = "rl_core.selfcheck.torch.losses:token_loss"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the masked tokens, and rows."""
        return {"tokens": float(np.sum(batch.ragged("loss_mask").values)), "sequences": float(len(batch))}


@dataclass(frozen=True)
class ReturnsLoss:
    """Squared error of values to returns over tokens."""

    temperature: float = 1.0
    columns: ClassVar[tuple[str, ...]] = ("loss_mask", "returns")
    reads: ClassVar[tuple[Read, ...]] = (VALUES,)
    implementation: ClassVar[str] = "rl_core.selfcheck.torch.losses:value_loss"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the masked tokens."""
        return {"tokens": float(np.sum(batch.ragged("loss_mask").values))}


@dataclass(frozen=True)
class PairLoss:
    """Bradley-Terry on the scores of the two rows of each pair."""

    temperature: float = 1.0
    columns: ClassVar[tuple[str, ...]] = ("pair", "is_chosen")
    reads: ClassVar[tuple[Read, ...]] = (SCORES,)
    implementation: ClassVar[str] = "rl_core.selfcheck.torch.losses:pair_loss"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return pairs."""
        return {"pairs": float(len(np.unique(batch.array("pair"))))}
