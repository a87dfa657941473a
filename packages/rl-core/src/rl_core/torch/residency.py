"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rl_core.model import Part
from rl_core.torch.parked import Parked


class Residency(ABC):
    """Which parts of a model are on its device.

    On `cpu`, and for tensors that are on the host anyhow, there is nothing to free and only the order of calls is kept:
    a model whose parameters were offloaded refuses work until they are back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away: dict[Part, list[Parked]] = {}

    @abstractmethod
    def kept(self, part: Part) -> Iterable[Tensor]:
        """What a part consists of, which comes back bit for bit."""

    def lost(self, part: Part) -> Iterable[Tensor]:
        """What leaves the device with a part and comes back as zeros."""
        return ()

    def offload(self, parts: Sequence[Part]) -> None:
        """Free the device of these parts."""
        for part in parts:
            if part not in self._away:
                self._away[part] = [
                    Parked(_movable(self.kept(part))),
                    Parked(_movable(self.lost(part)), keeps=False),
                ]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[Part]) -> None:
        """Bring these parts back, bit for bit."""
        for part in parts:
            for parked in self._away.pop(part, []):
                parked.restore()

    def require(self, *parts: Part) -> None:
        """Raise a `RuntimeError` naming the parts that are needed and away."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} are offloaded; call onload({missing}) first")


def _movable(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.device.type != "cpu"]
