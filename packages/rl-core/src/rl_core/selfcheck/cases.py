"""Checks that a model family trains correctly: the cases that a training backend is given, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["exact", "off", "refused"]


@dataclass(frozen=True)
class FamilyCase:
    """How a tiny model of a family trains on one mesh, against one process.

    Args:
        mesh: Name of the mesh, `tp2 x fsdp2`.
        layout: Layout of rows, and the weights that train: `packed, full`.
        verdict: `exact` to rounding; `off` if numbers or tensors differ, or the case fails; `refused` if the backend
            reports beforehand that it does not support the case.
        differences: Largest difference by compared quantity (`loss`, `grad_norm`, `weights`, and `adapter`: the weights
            that its exported files give).
        names: Tensors that the weight stream gets wrong.
        reason: Reason of a refusal or a failure, or of why differences above the tolerance are rounding.
    """

    mesh: str
    layout: str
    verdict: Verdict
    differences: Mapping[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    reason: str = ""


def at_most_two(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Parallel sizes of a small mesh that splits a model along the same axes: those above 1 become 2."""
    return {name: min(size, 2) for name, size in sizes.items() if size}
