"""The critic's loss, described without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.data.batch import Batch
from rl_core.model import VALUES, Read


@dataclass(frozen=True)
class ValueLoss:
    """Mean squared distance of the values of tokens under `loss_mask` from `targets`."""

    implementation: str = "three_roles.torch_loss:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("loss_mask", "targets")

    @property
    def reads(self) -> tuple[Read, ...]:
        return (VALUES,)

    @property
    def temperature(self) -> float:
        return 1.0

    def totals(self, batch: Batch) -> Mapping[str, float]:
        return {"tokens": float(batch.ragged("loss_mask").values.sum(dtype="int64"))}
