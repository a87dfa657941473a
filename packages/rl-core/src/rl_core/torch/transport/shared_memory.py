"""Memory that two processes see: anonymous files on CPU, CUDA IPC on a GPU. Neither outlives the processes."""

from __future__ import annotations

import base64
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.channel import Channel


class SharedBuffers(Protocol):
    """Buffers of the sender that receivers map."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """uint8 `[capacity]` each."""

    @property
    def need_release(self) -> bool:
        """Return whether the memory is freed only after every receiver has let it go."""

    def fits(self, count: int, capacity: int) -> bool:
        """Return whether there are as many, each as large."""

    def offer(self, channel: Channel) -> None:
        """Let the receiver at the other end map them."""

    def close(self) -> None:
        """Release them."""


class HostBuffers:
    """Shared memory without a name (memfd): the kernel frees it with its last user, however that ends."""

    need_release = False

    def __init__(self, count: int, capacity: int) -> None:
        self._capacity = capacity
        self._files = [os.memfd_create("weights", os.MFD_CLOEXEC) for _ in range(count)]
        for file in self._files:
            os.ftruncate(file, capacity)
        self.tensors = [_map(file, capacity) for file in self._files]

    def fits(self, count: int, capacity: int) -> bool:
        return _fit(self.tensors, count, capacity)

    def offer(self, channel: Channel) -> None:
        channel.send({"files": len(self._files), "capacity": self._capacity}, "sharing memory")
        channel.send_files(self._files)

    def close(self) -> None:
        """Close the files; what is mapped stays until its tensors are gone."""
        while self._files:
            os.close(self._files.pop())


class DeviceBuffers:
    """CUDA memory, shared through IPC handles; what is closed while a receiver still maps it stays in torch's limbo."""

    need_release = True

    def __init__(self, count: int, capacity: int, device: torch.device) -> None:
        self.tensors = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(count)]

    def fits(self, count: int, capacity: int) -> bool:
        return _fit(self.tensors, count, capacity)

    def offer(self, channel: Channel) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        handles = [reduce_tensor(tensor)[1] for tensor in self.tensors]
        channel.send({"handles": base64.b64encode(pickle.dumps(handles)).decode()}, "sharing memory")

    def close(self) -> None:
        """Free the memory once the receivers have let it go."""
        self.tensors.clear()
        torch.cuda.ipc_collect()


def _fit(tensors: Sequence[torch.Tensor], count: int, capacity: int) -> bool:
    return len(tensors) >= count and all(tensor.numel() >= capacity for tensor in tensors)


def shared_buffers(count: int, capacity: int, device: Device) -> SharedBuffers:
    """Return buffers on a device: its own memory if it has any, else the host's."""
    if device.torch_device.index is None:
        return HostBuffers(count, capacity)
    return DeviceBuffers(count, capacity, device.torch_device)


def map_offered(offer: Mapping[str, Any], channel: Channel, device: Device) -> list[torch.Tensor]:
    """Map the buffers of `SharedBuffers.offer` into this process.

    Raises:
        WeightSyncError: If they lie on another kind of device.
    """
    opens_handles = device.torch_device.index is not None
    if ("handles" in offer) != opens_handles:
        raise WeightSyncError(f"the sender shares memory of another kind of device than this receiver's {device.name}")
    if opens_handles:
        return [_open(handle, device.torch_device) for handle in pickle.loads(base64.b64decode(offer["handles"]))]
    files = channel.receive_files(offer["files"], "sharing memory")
    try:
        return [_map(file, offer["capacity"]) for file in files]
    finally:
        for file in files:
            os.close(file)


_DEVICE = 6
"""Position of the device's index among the arguments of torch's `rebuild_cuda_tensor`."""


def _open(handle: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    # the same GPU may have another index in this process; both found one another by its UUID
    arguments = (*handle[:_DEVICE], device.index, *handle[_DEVICE + 1 :])
    return rebuild_cuda_tensor(*arguments)


def _map(file: int, capacity: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, capacity), dtype=torch.uint8)
