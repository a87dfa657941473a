"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from rl_core.model import Part
from rl_core.torch.parked import Parked
from rl_dtensor.model import ShardedModel
from rl_dtensor.parallel.fsdp import local


class Residency:
    """Which parts of a model are on its device.

    On `cpu`, and for what `cpu_offload` keeps on the host, there is nothing to free and only the order of calls is
    kept: a model whose parameters were offloaded refuses work until they are back.
    """

    def __init__(self, model: ShardedModel, optimizer: Optimizer | None, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._away: dict[Part, Parked] = {}

    def offload(self, parts: Sequence[Part]) -> None:
        """Free the device of these parts."""
        for part in parts:
            if part not in self._away:
                if part == "parameters":
                    self._model.reshard_all()
                self._away[part] = Parked(tensor for tensor in self._tensors(part) if self._is_movable(tensor))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[Part]) -> None:
        """Bring these parts back, bit for bit."""
        for part in parts:
            if part in self._away:
                self._away.pop(part).restore()

    def require(self, *parts: Part) -> None:
        """Raise a `RuntimeError` naming the parts that are needed and away."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} are offloaded; call onload({missing}) first")

    def _is_movable(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"

    def _tensors(self, part: Part) -> list[Tensor]:
        if part == "parameters":
            return [local(parameter) for parameter in self._model.parameters()]
        if self._optimizer is None:
            return []
        return [
            local(value)
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
