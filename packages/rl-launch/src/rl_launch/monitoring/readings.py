"""What was read since the last step, and last of all."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_launch.monitoring.quantities import GPU_UTILIZATION, Reading

PREFIX = "system/"
"""Of the metrics that readings become."""

ALL_GPUS = "system/gpu_utilization"
"""Mean utilization of all GPUs."""


@dataclass
class _OverStep:
    """Readings of one thing in the step in progress."""

    total: float = 0.0
    count: int = 0
    largest: float = float("-inf")

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        return self.total / self.count


class Readings:
    """Readings as they arrive from one thread, taken by others: per step as a mean and a maximum, and the newest of
    each thing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[object, Reading] = {}
        self._over_step: dict[tuple[str, str], _OverStep] = {}

    def add(self, readings: Iterable[Reading]) -> None:
        """Take readings in."""
        with self._lock:
            for reading in readings:
                self._newest[reading.key] = reading
                quantity = reading.quantity
                if quantity.recorded:
                    over_step = self._over_step.setdefault((reading.subject, quantity.recorded), _OverStep())
                    over_step.add(reading.value * quantity.scale)

    def forget(self, label: str, value: str) -> None:
        """Forget the newest readings of everything with a label, because it no longer answers."""
        with self._lock:
            self._newest = {key: reading for key, reading in self._newest.items() if reading.labels.get(label) != value}

    def forget_all(self) -> None:
        """Forget the newest readings of everything, because the workers have ended."""
        with self._lock:
            self._newest = {}

    @property
    def has_any(self) -> bool:
        """True if something was read in the step in progress."""
        return bool(self._over_step)

    def take(self) -> dict[str, float]:
        """Metrics of the step in progress, which ends with the call: `system/<subject>/<name>` is the mean of its
        readings and `system/<subject>/max_<name>` the largest.
        """
        with self._lock:
            found, self._over_step = self._over_step, {}
        metrics: dict[str, float] = {}
        for (subject, name), over_step in found.items():
            metrics[f"{PREFIX}{subject}/{name}"] = over_step.mean
            metrics[f"{PREFIX}{subject}/max_{name}"] = over_step.largest
        of_gpus = [each.mean for (subject, name), each in found.items() if name == GPU_UTILIZATION.recorded]
        if of_gpus:
            metrics[ALL_GPUS] = sum(of_gpus) / len(of_gpus)
        return metrics

    def newest(self) -> Sequence[Reading]:
        """The newest reading of each thing."""
        with self._lock:
            return tuple(self._newest.values())
