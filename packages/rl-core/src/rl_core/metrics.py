"""Partial metrics of ranks and microbatches, and their reduction to one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min"]

CLOCKED = frozenset({"flops_per_second", "mfu"})
"""Metrics of a training step that depend on the clock: two runs of the same steps agree on all others."""


@dataclass(frozen=True)
class Metric:
    """One part of a metric. Parts combine in any order and grouping to the same result.

    Args:
        value: for a mean the numerator, else the part's own value.
        weight: for a mean the denominator; not used otherwise.
        reduction: how parts combine.
    """

    value: float
    weight: float = 1.0
    reduction: Reduction = "mean"

    def __add__(self, other: Metric) -> Metric:
        if self.reduction != other.reduction:
            raise ValueError(f"a metric cannot be both {self.reduction} and {other.reduction}")
        values = float(self.value), float(other.value)
        # a NaN comes through whichever part has it, which max and min alone would leave to the order
        pick = {"max": max, "min": min}.get(self.reduction, sum)
        combined = sum(values) if any(map(math.isnan, values)) else pick(values)
        return Metric(combined, self.weight + other.weight, self.reduction)

    def result(self) -> float:
        """The number to report; a mean over nothing is 0."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.weight if self.weight else 0.0


def reduce_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Combine the parts of every rank and report each metric once."""
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            combined[name] = combined[name] + metric if name in combined else metric
    return {name: metric.result() for name, metric in combined.items()}
