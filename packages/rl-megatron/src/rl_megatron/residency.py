"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from torch import Tensor

from rl_core.devices import Device
from rl_core.model import Part
from rl_core.torch.residency import Residency
from rl_megatron.model import ReadingModel
from rl_megatron.sharded_optimizer import ShardedOptimizer


class ModelResidency(Residency):
    """Of Megatron's model: its parameters, and the state of its optimizer, with which gradient buffers go."""

    def __init__(self, model: ReadingModel, optimizer: ShardedOptimizer | None, device: Device) -> None:
        super().__init__(device)
        self._model = model
        self._optimizer = optimizer

    def kept(self, part: Part) -> list[Tensor]:
        if part == "parameters":
            return [parameter.detach() for parameter in self._model.parameters()]
        return [] if self._optimizer is None else self._optimizer.state_tensors()

    def lost(self, part: Part) -> list[Tensor]:
        return [] if part == "parameters" or self._optimizer is None else self._optimizer.grad_buffers()
