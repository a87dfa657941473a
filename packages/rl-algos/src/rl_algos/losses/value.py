"""The loss of a critic, described; computed by `rl_algos.torch.value`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl_algos.losses.mask import num_masked
from rl_core.data.batch import Batch
from rl_core.model import VALUES, Read


@dataclass(frozen=True)
class ValueLoss:
    """`max((V - R)^2, (clip(V) - R)^2) / 2` with the return R of each sampled token, averaged over all of them in the
    batch (the clipped value loss of PPO, arXiv:1707.06347 and its code).

    `clip(V) = min(max(V, v - c), v + c)`, v the value before the step: once a value has moved by more than c, moving
    it further towards the return has no gradient.

    Args:
        clip: C; None takes `(V - R)^2 / 2`.
    """

    reads: ClassVar[tuple[Read, ...]] = (VALUES,)
    temperature: ClassVar[float] = 1.0
    clip: float | None = None
    implementation: str = "rl_algos.torch.value:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 and `returns` `[tokens]`, and `values` `[tokens]`, those before the step, to clip by."""
        return ("loss_mask", "returns") if self.clip is None else ("loss_mask", "returns", "values")

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` that were sampled."""
        return {"tokens": num_masked(batch)}
