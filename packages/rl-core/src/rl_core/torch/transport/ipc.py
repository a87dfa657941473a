"""Transport between processes of one machine through memory that both see."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch

from rl_core.devices import Device
from rl_core.torch.transport.bucket import Bucket, capacity, fingerprint
from rl_core.torch.transport.rendezvous import abort_all, accept_receivers, find_sender
from rl_core.torch.transport.shared_memory import SharedBuffers, map_offered, shared_buffers
from rl_core.weights import Digests, Manifest, Transport

NUM_BUFFERS = 2
"""One is filled while the receivers read the other."""

RELEASE_S = 10.0
"""How long the receivers may take to let the sender's memory go before it frees its own part in it."""


class IpcSenderLink:
    """Fills shared buffers in turn; a buffer is filled again when every receiver has acknowledged it."""

    def __init__(
        self,
        manifest: Manifest,
        layout: list[Bucket],
        transport: Transport,
        device: Device,
        num_receivers: int,
    ) -> None:
        self._device = device
        self._num_buckets = len(layout)
        self._acknowledged = 0
        self._sent = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(_meeting_place(transport, device))
            listener.listen(max(1, num_receivers))
            self._channels = accept_receivers(listener, num_receivers, fingerprint(manifest), transport.timeout_s)
        count, size = min(NUM_BUFFERS, len(layout)), capacity(layout)
        self._buffers: SharedBuffers = shared_buffers(count, size, device)
        try:
            for channel in self._channels.values():
                self._buffers.offer(channel)
        except BaseException as error:
            abort_all(self._channels.values(), f"{type(error).__name__}: {error}")
            self._buffers.close()
            raise

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        self._await_acknowledgements(bucket.index - NUM_BUFFERS + 1)
        return self._buffers.tensors[bucket.index % NUM_BUFFERS]

    def send(self, bucket: Bucket) -> None:
        self._device.synchronize()
        for channel in self._channels.values():
            channel.send({"bucket": bucket.index}, f"bucket {bucket.index + 1} of {self._num_buckets}")
        self._sent += 1

    def finish(self) -> Mapping[int, Digests]:
        self._await_acknowledgements(self._sent)
        return {rank: channel.receive("digests")["digests"] for rank, channel in self._channels.items()}

    def abort(self, reason: str) -> None:
        for channel in self._channels.values():
            channel.abort(reason)

    def close(self) -> None:
        if self._buffers.need_release:
            # a receiver closes its end when it has let the buffers go
            for channel in self._channels.values():
                channel.await_close(RELEASE_S)
        for channel in self._channels.values():
            channel.close()
        self._buffers.close()

    def _await_acknowledgements(self, count: int) -> None:
        while self._acknowledged < count:
            phase = f"bucket {self._acknowledged + 1} of {self._num_buckets}"
            for channel in self._channels.values():
                message = channel.receive(phase)
                assert message == {"taken": self._acknowledged}, message
            self._acknowledged += 1


class IpcReceiverLink:
    """Reads the sender's buffers where they lie."""

    def __init__(
        self, manifest: Manifest, layout: list[Bucket], transport: Transport, rank: int, device: Device
    ) -> None:
        self._device = device
        self._phase = f"receiver rank {rank}, bucket {{}} of {len(layout)}"
        self._channel = find_sender(
            socket.AF_UNIX, _meeting_place(transport, device), rank, fingerprint(manifest), transport.timeout_s
        )
        self._rank = rank
        try:
            self._buffers = map_offered(self._channel, device)
        except BaseException:
            self._channel.close()
            raise

    def receive(self, bucket: Bucket) -> torch.Tensor:
        message = self._channel.receive(self._phase.format(bucket.index + 1))
        assert message == {"bucket": bucket.index}, message
        return self._buffers[bucket.index % NUM_BUFFERS]

    def release(self, bucket: Bucket) -> None:
        self._device.synchronize()
        self._channel.send({"taken": bucket.index}, self._phase.format(bucket.index + 1))

    def finish(self, digests: Digests) -> None:
        self._channel.send({"digests": dict(digests)}, f"receiver rank {self._rank}, digests")

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._buffers.clear()
        self._device.release_memory()
        self._channel.close()


def _meeting_place(transport: Transport, device: Device) -> str:
    """Name of an abstract socket (it leaves no file): one per memory, so that a sender meets those that can map its
    buffers.
    """
    return f"\0rl-weights/{transport.address}/{device.memory_id}"
