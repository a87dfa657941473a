"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from rl_core.devices import Device
from rl_core.model import Part
from rl_core.torch.residency.module_residency import Residency
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local


class ModelResidency(Residency):
    """Residency of a sharded model: its parameters, and the state of its optimizer."""

    def __init__(self, model: ShardedModel, optimizer: Optimizer | None, device: Device) -> None:
        super().__init__(device)
        self._model = model
        self._optimizer = optimizer

    def kept(self, part: Part) -> list[Tensor]:
        if part == "parameters":
            self._model.reshard_all()
            return [local(parameter) for parameter in self._model.parameters()]
        if self._optimizer is None:
            return []
        return [
            local(value)
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
