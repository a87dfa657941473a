"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rl_core.devices import Device
from rl_core.model import ModelPart
from rl_core.torch.residency import Residency
from rl_megatron.model.model import ReadingModel
from rl_megatron.training.sharded_optimizer import MegatronOptimizer


class MegatronResidency(Residency):
    """Residency of Megatron's model: its parameters, and the state of its optimizer together with gradient buffers."""

    def __init__(self, model: ReadingModel, optimizer: MegatronOptimizer | None, device: Device) -> None:
        super().__init__(device)
        self._model = model
        self._optimizer = optimizer

    def offload(self, parts: Sequence[ModelPart]) -> None:
        """Free the device of these parts. The 8-bit copies of weights go with the parameters."""
        if "parameters" in parts:
            # Layers of Transformer Engine keep the copies between microbatches; a first microbatch makes them anew.
            for chunk in self._model.chunks:
                for module in chunk.modules():
                    vars(module).get("_fp8_workspaces", {}).clear()
        super().offload(parts)

    def kept(self, part: ModelPart) -> list[Tensor]:
        if part == "parameters":
            return [parameter.detach() for parameter in self._model.parameters()]
        return [] if self._optimizer is None else self._optimizer.state_tensors()

    def lost(self, part: ModelPart) -> list[Tensor]:
        return [] if part == "parameters" or self._optimizer is None else self._optimizer.grad_buffers()
