"""Whose turn it is among datasets that are drawn from in proportion to weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Shares:
    """Stride scheduling: the next draw is from the dataset whose draw is due first, where one of weight w is due every
    `1 / w`. Its order depends only on the weights.

    Args:
        weights: Weights of each dataset, above 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)
        self.drawn = np.zeros(len(self.weights), dtype=np.int64)
        # as of the last change of the weights: draws until then, and when the last of each was due
        self._drawn_before = np.zeros_like(self.drawn)
        self._due_before = np.zeros_like(self.weights)

    def next(self) -> int:
        """Draw: the place of the dataset."""
        which = int(np.argmin(self._due()))
        self.drawn[which] += 1
        return which

    def change(self, weights: Sequence[float]) -> None:
        """Draw in proportion to other weights from here on. What is left of the time to each dataset's next draw
        shrinks as its weight grows, so that frequent changes hold no dataset back.
        """
        due, changed = self._due(), np.asarray(weights, dtype=np.float64)
        now = due.min()
        due = now + (due - now) * self.weights / changed
        self._due_before, self._drawn_before, self.weights = due - 1 / changed, self.drawn.copy(), changed

    def state(self) -> Mapping[str, Any]:
        """The position, as JSON."""
        return {
            "drawn": self.drawn.tolist(),
            "weights_now": self.weights.tolist(),
            "drawn_before": self._drawn_before.tolist(),
            "due_before": self._due_before.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self.drawn = np.asarray(state["drawn"], dtype=np.int64)
        # positions of versions without changes have the draws alone
        self.weights = np.asarray(state.get("weights_now", self.weights), dtype=np.float64)
        self._drawn_before = np.asarray(state.get("drawn_before", self._drawn_before), dtype=np.int64)
        self._due_before = np.asarray(state.get("due_before", self._due_before), dtype=np.float64)

    def _due(self) -> np.ndarray:
        """When the next draw of each dataset is due."""
        due: np.ndarray = self._due_before + (self.drawn - self._drawn_before + 1) / self.weights
        return due
