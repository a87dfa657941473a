"""Weights of terms of the loss that follow what they bring about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class AdaptiveWeight(Protocol):
    """A weight that follows what it brings about."""

    @property
    def value(self) -> float:
        """The weight in force."""
        ...

    @property
    def watches(self) -> str:
        """Name of the metric that it follows."""
        ...

    def observe(self, measured: float) -> None:
        """Move by what a step measured."""
        ...

    def state(self) -> Mapping[str, Any]:
        """State that `restore` goes on from."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        ...


class AdaptiveKL:
    """`weight (1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon)` after each step (Ziegler et al.,
    arXiv:1909.08593).

    Args:
        weight: the first.
        target: mean KL divergence per sampled token.
        rate: rollouts of a step over the horizon.
    """

    watches = "policy/kl"

    def __init__(self, weight: float, *, target: float, rate: float) -> None:
        self.value = weight
        self._target = target
        self._rate = rate

    def observe(self, measured: float) -> None:
        """Rise above the target, fall below it."""
        self.value *= 1 + float(np.clip(measured / self._target - 1, -0.2, 0.2)) * self._rate

    def state(self) -> Mapping[str, Any]:
        """The weight."""
        return {"weight": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from that weight."""
        self.value = state["weight"]


class AdaptiveEntropy:
    """A weight that rises by a step below the target entropy and falls above it, not below 0, and which is 0 above it
    (Skywork-OR1, arXiv:2505.22312).

    Args:
        weight: the first.
        target: mean entropy per sampled token.
        step: change of the weight.
    """

    watches = "policy/entropy"

    def __init__(self, weight: float, *, target: float, step: float) -> None:
        self._weight = weight
        self._target = target
        self._step = step
        self._is_below = True

    @property
    def value(self) -> float:
        """0 while the last entropy measured is above the target."""
        return self._weight if self._is_below else 0.0

    def observe(self, measured: float) -> None:
        """Rise below the target, fall above it."""
        self._is_below = measured <= self._target
        self._weight = max(0.0, self._weight + (self._step if measured < self._target else -self._step))

    def state(self) -> Mapping[str, Any]:
        """The weight, and whether it applies."""
        return {"weight": self._weight, "is_below": self._is_below}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from that weight."""
        self._weight, self._is_below = state["weight"], state["is_below"]
