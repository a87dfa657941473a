"""Fixed token rows by which an engine proves that it computes with the weights that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.data.ragged import Ragged
from rl_core.errors import Origin, WeightSyncError

CANARY = "weight sync canary"
"""Phase of the check, for messages."""


@dataclass(frozen=True)
class Canary:
    """Token rows whose logprobs the generators must agree on with the policy.

    Args:
        rows: Int32, fixed for the run.
        tolerance: Largest mean absolute difference of logprobs.
    """

    rows: Ragged
    tolerance: float

    @classmethod
    def of(
        cls, vocabulary: int, *, precision: str, tolerance: float | None = None, num_rows: int = 2, length: int = 24
    ) -> Canary:
        """Rows of random tokens: they involve every part of the model and contain no user's data.

        Args:
            vocabulary: Number of token ids to draw from.
            precision: Precision of the policy, which decides the default tolerance.
            tolerance: Maximum mean difference of logprobs; the default is the tolerance of the precision.
            num_rows: Number of rows.
            length: Number of tokens of each row.
        """
        draws = np.random.default_rng(0).integers(0, vocabulary, (num_rows, length), dtype=np.int32)
        return cls(Ragged.from_rows(draws), tolerance or {"float32": 1e-3}.get(precision, 0.1))

    def check(
        self,
        version: int,
        expected: Ragged,
        origins: Sequence[Origin],
        scores: Sequence[Sequence[np.ndarray]],
    ) -> None:
        """Compare logprobs of the rows.

        Args:
            version: Weight version that the engines serve.
            expected: Logprobs of the policy with that version.
            origins: Engines that scored the rows.
            scores: Their logprobs.

        Raises:
            WeightSyncError: Naming an engine that computes something else.
        """
        for origin, rows in zip(origins, scores, strict=True):
            for score, wanted in zip(rows, expected, strict=True):
                difference = float(np.abs(score - wanted).mean())
                if not difference <= self.tolerance:
                    raise WeightSyncError(
                        f"{origin}: logprobs with weight version {version} differ from the policy's by "
                        f"{difference:.3g} on average, more than {self.tolerance:g}; the engine does not compute the "
                        "same results as the policy. If it quantises weights or caches, increase "
                        "policy.generation.canary_tolerance"
                    )
