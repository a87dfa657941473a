"""Which of two sides that run at the same time waits for the other, and what to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

IDLE = 0.2
"""Share of the time for which training, or the generators, may have nothing to do."""

ENDS = 4
"""Steps at either end of a run that are not judged: rollouts do not run ahead in the first ones yet, and none are left
to run ahead of the last ones."""

WINDOW = 11
"""Steps that are judged together, by their median; an odd number, so that it is the share of a step."""


def steady(shares: Sequence[float]) -> Sequence[float]:
    """Return the shares of a run's steps to judge it by; empty if it is too short."""
    within = shares[ENDS:-ENDS]
    return within[-max(WINDOW, len(shares) // 4) :] if len(within) >= WINDOW else ()


def imbalance(trainer: float, generators: float, *, section: str = "") -> tuple[str, str] | None:
    """Return who waits, with the figures, and what to change; None if neither waits for long.

    Args:
        trainer: Share of the time in which training waits for rollouts, `idle/trainer`.
        generators: Share of the time in which generators have no rollouts, `idle/generators`.
        section: Section of the config that has `async_grpo`, as a prefix of keys.
    """
    ahead = f"{section}.async_grpo" if section else "async_grpo"
    resources = "policy.generation.colocated.resources.gpus_per_node"
    training_waits = f"training waits for rollouts {trainer:.0%} of the time"
    rollouts = (
        f"let more prompts run ahead ({ahead}.max_trajectory_age_steps), or bound the longest rollout "
        "(policy.generation.max_new_tokens)"
    )
    if trainer > IDLE and generators > IDLE:
        interrupt = f"let weight updates interrupt rollouts ({ahead}.in_flight_weight_updates)"
        return f"{training_waits}, and generators have none {generators:.0%} of it", f"{interrupt}, {rollouts}"
    if trainer > IDLE:
        return training_waits, f"give generation more devices ({resources}), {rollouts}"
    if generators > IDLE:
        slower = f"training is the slower side: give generation fewer devices ({resources}) and training more"
        return f"generators have no rollouts {generators:.0%} of the time", slower
    return None


class Balance:
    """Watches a window of steps of a run for a side that waits.

    Attributes:
        found: Who waits and what to change; None if neither side waits for long.
    """

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None
        self._num_steps = 0
        self._shares: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def observe(self, metrics: Mapping[str, float], *, steps_left: int) -> None:
        """Take the metrics of a step; one whose rollouts do not run ahead of training says nothing."""
        if "idle/trainer" not in metrics or steps_left < ENDS:
            return
        self._num_steps += 1
        if self._num_steps > ENDS:
            self._shares.append((metrics["idle/trainer"], metrics.get("idle/generators", 0.0)))
        if len(self._shares) == WINDOW:
            self.found = imbalance(*(median(shares) for shares in zip(*self._shares, strict=True)))

    def __str__(self) -> str:
        return "" if self.found is None else f"{self.found[0]}: {self.found[1]}"
