"""Transport between processes of one machine through memory that both see: anonymous files on CPU, CUDA IPC on a GPU.

Neither kind of memory outlives the processes. Memory of a GPU is freed at the end of a transfer, as others need it
between transfers; memory of the host is kept for the next one, as mapping it anew takes a fifth of a transfer.
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Bucket, Layout, Parts
from rl_core.torch.transport.channel import Channel
from rl_core.torch.transport.link import confirm, verify
from rl_core.torch.transport.rendezvous import MAX_PENDING, accept_receivers, await_ready, find_sender, say_ready
from rl_core.weights import Transport

NUM_BUFFERS = 2
"""One is filled while the receivers read the other."""

KEPT = {"buffers": "kept"}
"""Message in place of an offer of memory: the memory of the transfer before is used again."""

RELEASE_S = 10.0
"""Timeout in seconds for receivers to release the sender's memory before the sender frees its own part."""


class IpcSenderLink:
    """Fills shared buffers in turn; a buffer is filled again when every receiver has acknowledged it.

    Buffers on the host last as long as the connection, and grow with a transfer that needs larger ones.
    """

    def __init__(self, transport: Transport, device: Device) -> None:
        self._device = device
        self._parts: Parts = {}
        self._grouping: Sequence[int] | None = None
        self._told: Sequence[int] | None = None
        self._buffers: HostBuffers | DeviceBuffers | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(_meeting_place(transport, device))
            listener.listen(max(MAX_PENDING, transport.num_receivers))
            self._channels = accept_receivers(listener, transport)
        self.abort = self._channels.abort

    def begin(self, layout: Layout) -> Layout:
        self._layout = await_ready(self._channels, layout, self._parts)
        self._parts = self._layout.parts
        self._acknowledged = self._sent = 0
        self._grouping, self._has_offered = None, False
        return self._layout

    def regroup(self, buckets: Sequence[int]) -> Layout:
        """Send the tensors in other buckets, as `Layout.grouped`; after `begin` and before the first bucket."""
        self._layout, self._grouping = self._layout.grouped(buckets), buckets
        return self._layout

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        self._offer()
        self._await_acknowledgements(bucket.index - NUM_BUFFERS + 1)
        assert self._buffers is not None, "memory is offered first"
        return self._buffers.tensors[bucket.index % NUM_BUFFERS]

    def _offer(self) -> None:
        """Let the receivers map the memory of this transfer, once it is known how much it takes."""
        if self._has_offered:
            return
        self._has_offered = True
        if self._grouping != self._told:
            self._told = self._grouping
            self._channels.send({"buckets": self._grouping}, "the beginning of a transfer")
        count, size = min(NUM_BUFFERS, len(self._layout.buckets)), self._layout.capacity
        held = self._buffers
        if held and len(held.tensors) >= count and all(tensor.numel() >= size for tensor in held.tensors):
            self._channels.send(KEPT, "sharing memory")
            return
        self._free()
        has_memory = self._device.torch_device.index is not None
        self._buffers = (
            DeviceBuffers(count, size, self._device.torch_device) if has_memory else HostBuffers(count, size)
        )
        for channel in self._channels.values():
            self._buffers.offer(channel)

    def send(self, bucket: Bucket) -> int:
        self._device.synchronize()
        self._channels.send({"bucket": bucket.index}, f"bucket {bucket.index + 1} of {len(self._layout.buckets)}")
        self._sent += 1
        return bucket.num_bytes

    def finish(self, digests: Sequence[str]) -> None:
        self._offer()
        self._await_acknowledgements(self._sent)
        # A receiver answers when it has released the buffers.
        confirm(self._channels, self._layout, digests)
        if self._buffers is not None and self._buffers.need_release:
            self._free()

    def close(self) -> None:
        if self._buffers is not None and self._buffers.need_release:
            # A receiver closes its end when it has released the buffers of a transfer that was broken off.
            for channel in self._channels.values():
                channel.await_close(RELEASE_S)
        self._channels.close()
        self._free()

    def _free(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.close()
            self._device.release_memory()

    def _await_acknowledgements(self, count: int) -> None:
        while self._acknowledged < count:
            phase = f"bucket {self._acknowledged + 1} of {len(self._layout.buckets)}"
            for channel in self._channels.values():
                message = channel.receive(phase)
                assert message == {"taken": self._acknowledged}, message
            self._acknowledged += 1


class IpcReceiverLink:
    """Reads the sender's buffers in place."""

    def __init__(self, transport: Transport, rank: int, device: Device) -> None:
        self._device = device
        self._rank = rank
        self._told: Parts = {}
        self._grouping: Sequence[int] | None = None
        self._buffers: list[torch.Tensor] = []
        self._need_release = False
        self._channel = find_sender(socket.AF_UNIX, _meeting_place(transport, device), transport, rank)
        self.abort = self._channel.abort

    def begin(self, layout: Layout) -> Layout:
        say_ready(self._channel, layout, with_parts=layout.parts != self._told)
        self._told = layout.parts
        phase = f"receiver rank {self._rank}, sharing memory"
        offer = self._channel.receive(phase)
        if "buckets" in offer:
            self._grouping = offer["buckets"]
            offer = self._channel.receive(phase)
        if offer != KEPT:
            self._buffers = map_offered(offer, self._channel, self._device)
            self._need_release = (DeviceBuffers if "handles" in offer else HostBuffers).need_release
        self._layout = layout if self._grouping is None else layout.grouped(self._grouping)
        self._phase = f"receiver rank {self._rank}, bucket {{}} of {len(self._layout.buckets)}"
        return self._layout

    def receive(self, bucket: Bucket) -> torch.Tensor:
        message = self._channel.receive(self._phase.format(bucket.index + 1))
        assert message == {"bucket": bucket.index}, message
        return self._buffers[bucket.index % NUM_BUFFERS][: bucket.num_bytes]

    def release(self, bucket: Bucket) -> None:
        self._device.synchronize()
        self._channel.send({"taken": bucket.index}, self._phase.format(bucket.index + 1))

    def finish(self, digests: Sequence[str]) -> str:
        if self._need_release:
            self._buffers.clear()
        return verify(self._channel, self._layout, digests, self._rank)

    def close(self) -> None:
        self._buffers.clear()
        self._device.release_memory()
        self._channel.close()


def _meeting_place(transport: Transport, device: Device) -> str:
    """Return the name of an abstract socket (it leaves no file): one per memory, so that a sender meets those that can
    map its buffers."""
    return f"\0rl-weights/{transport.address}/{device.memory_id}"


class HostBuffers:
    """Buffers of the sender, uint8 `[capacity]` each, that receivers map: shared memory without a name (memfd).

    The kernel frees it with its last user, however that ends.
    """

    need_release = False
    """True if the memory is freed at the end of a transfer, and only after every receiver has let it go."""

    def __init__(self, count: int, capacity: int) -> None:
        self._capacity = capacity
        self._files = [os.memfd_create("weights", os.MFD_CLOEXEC) for _ in range(count)]
        for file in self._files:
            os.ftruncate(file, capacity)
        self.tensors = [_map(file, capacity) for file in self._files]

    def offer(self, channel: Channel) -> None:
        """Let the receiver at the other end map them."""
        channel.send({"files": len(self._files), "capacity": self._capacity}, "sharing memory")
        channel.send_files(self._files)

    def close(self) -> None:
        """Close the files; mappings stay until their tensors are gone."""
        while self._files:
            os.close(self._files.pop())


class DeviceBuffers:
    """Such buffers in CUDA memory, shared through IPC handles.

    Memory that is freed while a receiver still has a view of it stays in torch's limbo until `Device.release_memory` is
    called after the view is gone.
    """

    need_release = True

    def __init__(self, count: int, capacity: int, device: torch.device) -> None:
        self.tensors = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(count)]

    def offer(self, channel: Channel) -> None:
        """Let the receiver at the other end map them."""
        from torch.multiprocessing.reductions import reduce_tensor

        handles = [reduce_tensor(tensor)[1] for tensor in self.tensors]
        channel.send({"handles": base64.b64encode(pickle.dumps(handles)).decode()}, "sharing memory")

    def close(self) -> None:
        """Free the memory once the receivers have let it go."""
        self.tensors.clear()


_DEVICE = 6
"""Position of the device's index among the arguments of torch's `rebuild_cuda_tensor`."""


def map_offered(offer: Mapping[str, Any], channel: Channel, device: Device) -> list[torch.Tensor]:
    """Map the buffers that a sender's `offer` describes into this process.

    Raises:
        WeightSyncError: If they are on another kind of device.
    """
    opens_handles = device.torch_device.index is not None
    if ("handles" in offer) != opens_handles:
        raise WeightSyncError(f"the sender shares memory of another kind of device than this receiver's {device.name}")
    if opens_handles:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        handles = pickle.loads(base64.b64decode(offer["handles"]))
        # The same GPU may have another index in this process; both found one another by its UUID.
        index = device.torch_device.index
        return [rebuild_cuda_tensor(*handle[:_DEVICE], index, *handle[_DEVICE + 1 :]) for handle in handles]
    files = channel.receive_files(offer["files"], "sharing memory")
    try:
        return [_map(file, offer["capacity"]) for file in files]
    finally:
        for file in files:
            os.close(file)


def _map(file: int, capacity: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, capacity), dtype=torch.uint8)
