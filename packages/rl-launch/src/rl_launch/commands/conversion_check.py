"""The proof of a conversion: what a model computes before it and after its files have been loaded again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import RLError
from rl_core.model import HEADLESS_ROLES, LOGPROBS, SCORES, Model, Read, Role

_TOLERANCES = {"float32": 1e-5}
_HALF_TOLERANCE = 0.1
"""Of half precision: merged adapters and other kernels round otherwise, and wrong weights are off by more than 1."""

_NUM_ROWS, _LENGTH = 4, 32


@dataclass(frozen=True)
class Probe:
    """Rows of random tokens, and what a model computes for them.

    Args:
        batch: The rows.
        read: Logprobs, or scores of a model without a language-model head.
        tolerance: Largest difference, relative to values above 1.
    """

    batch: Batch
    read: Read
    tolerance: float

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], *, role: Role, precision: str, max_length: int = _LENGTH) -> Probe:
        """Rows that involve every part of a model.

        Args:
            hf_config: Fields of its Hugging Face config.
            role: Role of the model.
            precision: Precision of its computation.
            max_length: Maximum number of tokens of a row in its config.
        """
        text = {**hf_config, **(hf_config.get("text_config") or {})}
        length = min(_LENGTH, max_length, int(text.get("max_position_embeddings") or _LENGTH))
        draws = np.random.default_rng(0).integers(0, int(text["vocab_size"]), (_NUM_ROWS, length), dtype=np.int32)
        read = SCORES if role in HEADLESS_ROLES else LOGPROBS
        return cls(Batch({"tokens": Ragged.from_rows(draws)}), read, _TOLERANCES.get(precision, _HALF_TOLERANCE))

    def results(self, model: Model) -> np.ndarray:
        """Results of a model: float32 `[tokens]` or `[rows]`."""
        column = model.infer(self.batch, [self.read])[self.read.name]
        return column.values if isinstance(column, Ragged) else column

    def compare(self, before: np.ndarray, after: np.ndarray, subject: str) -> str:
        """Compare the results before a conversion with those of the files that it wrote; a sentence for the log.

        Args:
            before: Results of the source, `[tokens]` or `[rows]`.
            after: Results of the written files.
            subject: The files, for the message.

        Raises:
            RLError: If they differ.
        """
        scale = np.maximum(1.0, np.abs(before))
        difference = float(np.max(np.abs(before - after) / scale)) if before.shape == after.shape else math.inf
        if not difference <= self.tolerance:
            raise RLError(
                f"{subject} compute different {self.read.name} than the source: the largest difference is "
                f"{difference:.2g}, but only {self.tolerance:g} is allowed. The conversion is wrong, so nothing was "
                "kept. "
                "Check that the source is complete and has the architecture of its config. Use --no-verify to skip "
                "this "
                "comparison"
            )
        return f"{self.read.name} of {subject} agree with the source's to {difference:.1e}"
