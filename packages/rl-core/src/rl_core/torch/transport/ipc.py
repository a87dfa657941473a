"""Transport between processes of one machine through memory that both see."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from rl_core.devices import Device
from rl_core.torch.transport.bucket import Bucket, Layout
from rl_core.torch.transport.receipt import confirm, verify
from rl_core.torch.transport.rendezvous import MAX_PENDING, accept_receivers, await_ready, find_sender, say_ready
from rl_core.torch.transport.shared_memory import SharedBuffers, map_offered, shared_buffers
from rl_core.weights import Transport

NUM_BUFFERS = 2
"""One is filled while the receivers read the other."""

KEPT = {"buffers": "kept"}
"""Said in place of an offer of memory: that of the transfer before is used again."""

RELEASE_S = 10.0
"""Longest time that the receivers may take to release the sender's memory before the sender frees its own part."""


class IpcSenderLink:
    """Fills shared buffers in turn; a buffer is filled again when every receiver has acknowledged it.

    The buffers last as long as the connection, and grow with a transfer that needs larger ones.
    """

    def __init__(self, transport: Transport, device: Device) -> None:
        self._device = device
        self._buffers: SharedBuffers | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(_meeting_place(transport, device))
            listener.listen(max(MAX_PENDING, transport.num_receivers))
            self._channels = accept_receivers(listener, transport)

    def begin(self, layout: Layout) -> Layout:
        self._layout = layout
        self._acknowledged = self._sent = 0
        await_ready(self._channels, layout)
        count, size = min(NUM_BUFFERS, len(layout.buckets)), layout.capacity
        held = self._buffers
        if held is not None and held.fits(count, size):
            for channel in self._channels.values():
                channel.send(KEPT, "sharing memory")
            return layout
        self._buffers = shared_buffers(count, size, self._device)
        for channel in self._channels.values():
            self._buffers.offer(channel)
        if held is not None:
            held.close()
        return layout

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        self._await_acknowledgements(bucket.index - NUM_BUFFERS + 1)
        assert self._buffers is not None, "begin comes first"
        return self._buffers.tensors[bucket.index % NUM_BUFFERS]

    def send(self, bucket: Bucket) -> int:
        self._device.synchronize()
        for channel in self._channels.values():
            channel.send({"bucket": bucket.index}, f"bucket {bucket.index + 1} of {len(self._layout.buckets)}")
        self._sent += 1
        return bucket.num_bytes

    def finish(self, digests: Sequence[str]) -> None:
        self._await_acknowledgements(self._sent)
        confirm(self._channels, self._layout, digests)

    def abort(self, reason: str) -> None:
        for channel in self._channels.values():
            channel.abort(reason)

    def close(self) -> None:
        if self._buffers is not None and self._buffers.need_release:
            # a receiver closes its end when it has released the buffers
            for channel in self._channels.values():
                channel.await_close(RELEASE_S)
        for channel in self._channels.values():
            channel.close()
        if self._buffers is not None:
            self._buffers.close()

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
        self._buffers: list[torch.Tensor] = []
        self._channel = find_sender(socket.AF_UNIX, _meeting_place(transport, device), transport, rank)

    def begin(self, layout: Layout) -> None:
        self._layout = layout
        self._phase = f"receiver rank {self._rank}, bucket {{}} of {len(layout.buckets)}"
        say_ready(self._channel, layout)
        offer = self._channel.receive(f"receiver rank {self._rank}, sharing memory")
        if offer != KEPT:
            self._buffers = map_offered(offer, self._channel, self._device)

    def receive(self, bucket: Bucket) -> torch.Tensor:
        message = self._channel.receive(self._phase.format(bucket.index + 1))
        assert message == {"bucket": bucket.index}, message
        return self._buffers[bucket.index % NUM_BUFFERS][: bucket.num_bytes]

    def release(self, bucket: Bucket) -> None:
        self._device.synchronize()
        self._channel.send({"taken": bucket.index}, self._phase.format(bucket.index + 1))

    def finish(self, digests: Sequence[str]) -> None:
        verify(self._channel, self._layout, digests, self._rank)

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._buffers.clear()
        self._device.release_memory()
        self._channel.close()


def _meeting_place(transport: Transport, device: Device) -> str:
    """Return name of an abstract socket (it leaves no file): one per memory, so that a sender meets those that can map
    its buffers."""
    return f"\0rl-weights/{transport.address}/{device.memory_id}"
