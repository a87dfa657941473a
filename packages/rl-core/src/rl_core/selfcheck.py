"""What a training backend says of a model family, mesh by mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["exact", "off", "refused"]


@dataclass(frozen=True)
class FamilyCase:
    """How a tiny model of a family trains on one mesh, against one process.

    Args:
        mesh: name of the mesh, `tp2 x fsdp2`.
        layout: of rows, and what trains: `packed, full`.
        verdict: `exact` to rounding; `off` where numbers or names differ, or the case fails; `refused` where the
            backend says beforehand that it cannot be.
        differences: largest ones by what was compared (`loss`, `grad_norm`, `weights`).
        names: tensors that the weight stream gets wrong.
        reason: of a refusal or a failure.
    """

    mesh: str
    layout: str
    verdict: Verdict
    differences: Mapping[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    reason: str = ""
