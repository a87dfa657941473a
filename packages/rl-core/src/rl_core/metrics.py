"""Partial metrics of ranks and microbatches, and their reduction to one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "max", "min"]

OverUpdates = Literal["mean", "sum", "max", "min", "last"]
"""How one metric of several optimizer updates becomes one: each update counts alike."""

CLOCKED = frozenset({"flops_per_second", "mfu"})
"""Metrics of a training step that depend on the clock: two runs of the same steps agree on all others."""

OF_LAYOUT = frozenset({"packing_efficiency", "pipeline_bubble", "shared_tokens"})
"""Metrics of a training step that depend on how rows are spread over ranks and microbatches, in addition to the metrics
of the clock."""


@dataclass(frozen=True)
class Metric:
    """One part of a metric. Parts combine in any order and grouping to the same result.

    Args:
        value: For a mean the numerator, else the part's own value.
        weight: For a mean the denominator; not used otherwise.
        reduction: How the parts of one update (of ranks and microbatches) combine.
        over_updates: How the results of several updates combine; as their parts do if not given.
    """

    value: float
    weight: float = 1.0
    reduction: Reduction = "mean"
    over_updates: OverUpdates | None = None

    def __add__(self, other: Metric) -> Metric:
        if self.reduction != other.reduction:
            raise ValueError(f"a metric cannot be both {self.reduction} and {other.reduction}")
        values = float(self.value), float(other.value)
        # A NaN comes through whichever part has it, which max and min alone would leave to the order.
        pick = {"max": max, "min": min}.get(self.reduction, sum)
        combined = sum(values) if any(map(math.isnan, values)) else pick(values)
        return Metric(combined, self.weight + other.weight, self.reduction, self.over_updates)

    def result(self) -> float:
        """Return the number to report; a mean over nothing is 0."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.weight if self.weight else 0.0


def combine(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Return the metrics of one update, from the parts of every rank."""
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            combined[name] = combined[name] + metric if name in combined else metric
    return combined


def results(metrics: Mapping[str, Metric | float]) -> dict[str, float]:
    """Return the numbers to report."""
    return {name: metric.result() if isinstance(metric, Metric) else metric for name, metric in metrics.items()}


def reduce_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Return the numbers to report of one update, from the parts of every rank."""
    return results(combine(parts))


def over_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Return the metrics of a step of several optimizer updates: those that the first update reports."""
    picks: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": np.sum, "max": np.max, "min": np.min}
    found = {}
    for name, first in updates[0].items():
        values = [update[name].result() for update in updates]
        how = first.over_updates or first.reduction
        if how == "mean":
            found[name] = Metric(float(np.sum(values)), len(values))
        else:
            found[name] = Metric(values[-1] if how == "last" else float(picks[how](values)), reduction="sum")
    return found
