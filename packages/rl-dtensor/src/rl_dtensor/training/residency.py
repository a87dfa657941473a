"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from rl_core.devices import Device
from rl_core.model import Part
from rl_core.torch.residency.module_residency import Residency
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local


class Sharded(Protocol):
    """Parameters that FSDP shards: a `ShardedModel`, or a draft head."""

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank."""
        ...

    def reshard_all(self) -> None:
        """Free every gathered parameter."""
        ...


class ModelResidency(Residency):
    """Residency of a sharded model: its parameters, and the state of its optimizer.

    Args:
        model: The model.
        optimizer: Its optimizer; None if it does not train.
        device: Device that it leaves.
        head: Draft head that leaves with it, and its optimizer; None without one.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: Optimizer | None,
        device: Device,
        head: tuple[Sharded, Optimizer] | None = None,
    ) -> None:
        super().__init__(device)
        self._models: list[Sharded] = [model, *(() if head is None else (head[0],))]
        self._optimizers = [each for each in (optimizer, None if head is None else head[1]) if each is not None]

    def kept(self, part: Part) -> list[Tensor]:
        if part == "parameters":
            for model in self._models:
                model.reshard_all()
            return [local(parameter) for model in self._models for parameter in model.parameters()]
        return [
            local(value)
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
