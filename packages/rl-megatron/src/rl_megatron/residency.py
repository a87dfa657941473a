"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_core.model import Part
from rl_core.torch.parked import Parked
from rl_megatron.model import ReadingModel
from rl_megatron.sharded_optimizer import ShardedOptimizer


class Residency:
    """Which parts of a model are on its device. On `cpu` nothing is to be freed, and only the order of calls is kept: a
    model whose parameters were offloaded refuses work until they are back. Gradient buffers go with the optimizer.
    """

    def __init__(self, model: ReadingModel, optimizer: ShardedOptimizer | None, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._away: dict[Part, list[Parked]] = {}

    def offload(self, parts: Sequence[Part]) -> None:
        """Free the device of these parts."""
        for part in parts:
            if part not in self._away:
                self._away[part] = [Parked(self._movable(self._kept(part)))]
                if part == "optimizer" and self._optimizer is not None:
                    self._away[part].append(Parked(self._movable(self._optimizer.grad_buffers()), keeps=False))
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

    def _movable(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type != "cpu"]

    def _kept(self, part: Part) -> list[Tensor]:
        if part == "parameters":
            return [parameter.detach() for parameter in self._model.parameters()]
        return [] if self._optimizer is None else self._optimizer.state_tensors()
