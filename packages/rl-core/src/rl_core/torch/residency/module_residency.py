"""Parameters and optimizer state that leave the device to others for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from rl_core.devices import Device
from rl_core.model import Part
from rl_core.torch.residency.host_offload import HostOffload


class Residency(ABC):
    """Which parts of a model are on its device.

    Only tensors that the device holds are moved. On `cpu` it holds none, so there is nothing to free and only the order
    of calls is kept: a model whose parameters were offloaded refuses work until they are back.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._away: dict[Part, list[HostOffload]] = {}

    @abstractmethod
    def kept(self, part: Part) -> Iterable[Tensor]:
        """Tensors of a part, which come back bit for bit."""

    def lost(self, part: Part) -> Iterable[Tensor]:
        """Tensors that leave the device with a part and come back as zeros."""
        return ()

    def offload(self, parts: Sequence[Part]) -> None:
        """Free the device of these parts."""
        for part in parts:
            if part not in self._away:
                self._away[part] = [
                    HostOffload(self._held(self.kept(part)), self._device),
                    HostOffload(self._held(self.lost(part)), self._device, keeps=False),
                ]
        self._device.release_memory()

    def onload(self, parts: Sequence[Part]) -> None:
        """Bring these parts back, bit for bit."""
        for part in parts:
            for offloaded in self._away.pop(part, []):
                offloaded.restore()

    def require(self, *parts: Part) -> None:
        """Raise a `RuntimeError` naming the parts that are needed and away."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} are offloaded; call onload({missing}) first")

    def _held(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if self._device.holds(tensor)]


class ModuleResidency(Residency):
    """Residency of a module that is only computed with: its parameters and buffers."""

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__(device)
        self._module = module
        for tensor in self._held(self.kept("parameters")):
            if not tensor.untyped_storage().resizable():
                # mapped from a file: its pages cannot be freed here
                tensor.data = tensor.detach().clone()

    def kept(self, part: Part) -> list[Tensor]:
        return [*self._module.parameters(), *self._module.buffers()] if part == "parameters" else []
