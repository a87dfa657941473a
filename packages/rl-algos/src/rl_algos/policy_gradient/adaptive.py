"""Weights of terms of the loss that follow what they bring about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from rl_algos.losses.entropy import EntropyBonus
from rl_algos.losses.kl import KLPenalty


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
        """State that `restore` continues from."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        ...


class AdaptiveKL:
    """`weight (1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon)` after each step (Ziegler et al.,
    arXiv:1909.08593).

    Args:
        kl: Initial weight, target and horizon.
        rollouts_per_step: Number of rollouts of a step.
    """

    watches = "policy/kl"

    def __init__(self, kl: KLPenalty, *, rollouts_per_step: int) -> None:
        assert kl.target is not None
        self.value = kl.weight
        self._target = kl.target
        self._rate = rollouts_per_step / kl.horizon

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
    """A weight that increases by a step below the target entropy and decreases above it, not below 0, and which is 0
    above it (Skywork-OR1, arXiv:2505.22312).

    Args:
        bonus: Initial weight, target and change of the weight.
    """

    watches = "policy/entropy"

    def __init__(self, bonus: EntropyBonus) -> None:
        assert bonus.target is not None
        self._weight = bonus.weight
        self._target = bonus.target
        self._step = bonus.weight_step
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
