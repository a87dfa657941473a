"""Transport over its own process groups: gloo on CPU, NCCL on GPUs.

Receivers that keep the same parts of all tensors are in one group with the sender, which broadcasts these parts there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.process_group import listen_at
from rl_core.torch.transport.bucket import Bucket, Layout, Parts, digest_of
from rl_core.torch.transport.channel import Channel, Deadline, Receivers
from rl_core.torch.transport.link import confirm, verify
from rl_core.torch.transport.rendezvous import MAX_PENDING, accept_receivers, await_ready, find_sender, say_ready
from rl_core.weights import Transport

NUM_BUFFERS = 2
"""One is filled, or read, while the other is under way."""

_JOINING = "joining the group"
_POLL_S = 0.0005
_GRACE_S = 60.0
_LEAVE_S = 5.0
_LAST_WORDS_S = 20.0
"""Timeout in seconds for a peer to report why it left, or to be seen gone, after a failed collective."""


class UnderWay(NamedTuple):
    """Work of a group that has begun.

    Args:
        work: torch's handle of it.
        deadline: When it must be over, and its phase.
    """

    work: Any
    deadline: Deadline


class HandmadeGroup:
    """A process group apart from the default one, whose work is watched until it is over, the peers are gone or time
    is up.

    Args:
        group: Group of torch.
        check: Raises `WeightSyncError` in a phase if a peer is gone or has given up.
    """

    def __init__(self, group: Any, device: Device, *, timeout_s: float, check: Callable[[str], None]) -> None:
        self._group = group
        self.device = device
        self._timeout_s = timeout_s
        self._check = check

    def start(self, call: Callable[[Any], Any], phase: str) -> UnderWay:
        """Begin the work that `call` begins in the group."""
        with _naming_peers(phase, self._check, Deadline(self._timeout_s, phase)):
            work = call(self._group)
        return UnderWay(work, Deadline(self._timeout_s, phase))

    def wait(self, begun: UnderWay) -> None:
        """Wait until work is over here."""
        work, deadline = begun
        while not work.is_completed():
            self._check(deadline.phase)
            deadline.remaining()
            time.sleep(_POLL_S)
        with _naming_peers(deadline.phase, self._check, deadline):
            work.wait()

    def close(self) -> None:
        """Leave the group, whatever is under way in it."""
        if self.device.collectives == "nccl":
            self._group.abort()
        # gloo releases a group only when its unfinished calls have ended: when the peers have left, or time is up.
        groups = [self._group]
        del self._group
        leaving = threading.Thread(target=groups.clear, name="leave", daemon=True)
        leaving.start()
        # A process that ends while the thread works ends with an abort.
        leaving.join(_LEAVE_S)


class _Broadcasts:
    """Broadcasts from rank 0 in its own group."""

    def __init__(self, group: HandmadeGroup, *, who: str) -> None:
        self._group = group
        self._num_buckets = 0
        self.device = group.device
        self._who = who
        self.unfinished: dict[int, UnderWay] = {}
        self._buffers: list[torch.Tensor] = []

    def begin(self, layout: Layout) -> None:
        """Begin a transfer."""
        self._num_buckets = len(layout.buckets)
        count, place = min(NUM_BUFFERS, self._num_buckets), self.device.torch_device
        self._buffers = [torch.empty(layout.capacity, dtype=torch.uint8, device=place) for _ in range(count)]

    def finish(self) -> None:
        """End a transfer; what comes until the next one can use the memory of its buffers."""
        self._buffers.clear()

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's buffer, whoever uses it now."""
        return self._buffers[bucket.index % NUM_BUFFERS]

    def start(self, bucket: Bucket) -> None:
        """Begin the broadcast of a bucket, or of its changes; rank 0 sends what is in its buffer, the others get it
        there.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        place = self.buffer(bucket)[: max(1, bucket.num_bytes)]
        self.device.synchronize()
        self.unfinished[bucket.index] = self._group.start(
            lambda group: group.broadcast([place], options), self.phase(bucket.index)
        )

    def wait(self, index: int) -> None:
        """Wait until the broadcast of this bucket is over here."""
        self._group.wait(self.unfinished.pop(index))
        self.device.synchronize()

    def close(self) -> None:
        """Leave the group, whatever is under way in it."""
        self._group.close()
        self.unfinished.clear()
        self._buffers.clear()

    def phase(self, index: int) -> str:
        """Return the transfer of a bucket, for messages."""
        return f"{self._who}, bucket {index + 1} of {self._num_buckets}"


def collective_sender_links(transport: Transport, device: Device) -> list[CollectiveSenderLink]:
    """Meet the receivers; a link for each group of those that keep the same parts."""
    host, port = host_and_port(transport.address)
    count = transport.num_receivers
    with socket.create_server((host, port), backlog=max(MAX_PENDING, count)) as listener:
        channels = accept_receivers(listener, transport)
    links: list[CollectiveSenderLink] = []
    try:
        if list(channels) != list(range(1, count + 1)):
            raise WeightSyncError(f"receivers of a collective have ranks 1 to {count}, got {list(channels)}")
        groups: dict[str, Receivers] = {}
        for rank, channel in channels.items():
            groups.setdefault(channel.receive(_JOINING)["keeps"], Receivers())[rank] = channel
        for group in groups.values():
            links.append(CollectiveSenderLink(group, transport, device))
    except BaseException as error:
        channels.abort(f"{type(error).__name__}: {error}")
        channels.close()
        for link in links:
            link.close()
        raise
    return links


class CollectiveSenderLink:
    """Rank 0 of a group.

    Args:
        channels: Channels to the receivers, by their ranks among all receivers.
    """

    def __init__(self, channels: Receivers, transport: Transport, device: Device) -> None:
        self._channels = channels
        self.abort = channels.abort
        self._announces = transport.sends_changes
        self._parts: Parts = {}
        phase = f"sender rank 0, joining the group with receiver ranks {', '.join(map(str, channels))}"
        self._broadcasts = _Broadcasts(found_group(channels, transport, device, phase), who="sender rank 0")

    def begin(self, layout: Layout) -> Layout:
        self._layout = await_ready(self._channels, layout, self._parts)
        self._parts = self._layout.parts
        self._broadcasts.begin(self._layout)
        return self._layout

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket.index >= NUM_BUFFERS:
            self._broadcasts.wait(bucket.index - NUM_BUFFERS)
        return self._broadcasts.buffer(bucket)

    def send(self, bucket: Bucket) -> int:
        if self._announces:
            self._channels.send({"bytes": bucket.num_bytes}, self._broadcasts.phase(bucket.index))
        self._broadcasts.start(bucket)
        return bucket.num_bytes

    def finish(self, digests: Sequence[str]) -> None:
        for index in sorted(self._broadcasts.unfinished):
            self._broadcasts.wait(index)
        self._broadcasts.finish()
        confirm(self._channels, self._layout, digests)

    def close(self) -> None:
        self._channels.close()
        self._broadcasts.close()


class CollectiveReceiverLink:
    """A rank of a group from 1 on; receives the next bucket while the present one is read, if it knows the size.

    Args:
        rank: Among all receivers.
        parts: That it keeps; receivers of the same ones are in its group.
    """

    def __init__(self, transport: Transport, rank: int, device: Device, parts: Parts) -> None:
        self._rank = rank
        self._awaits_sizes = transport.sends_changes
        self._told: Parts = {}
        self._channel = find_sender(socket.AF_INET, host_and_port(transport.address), transport, rank)
        self.abort = self._channel.abort
        phase = f"receiver rank {rank}, joining the sender's group"
        try:
            self._channel.send({"keeps": digest_of(parts)}, phase)
            group, place = join_offered(self._channel, transport, device, phase)
        except BaseException:
            self._channel.close()
            raise
        self._is_first = place == 1
        self._broadcasts = _Broadcasts(group, who=f"receiver rank {rank} from the sender")

    def begin(self, layout: Layout) -> Layout:
        self._layout = layout
        is_news = self._is_first and layout.parts != self._told
        say_ready(self._channel, layout, with_parts=is_news)
        self._told = layout.parts
        self._broadcasts.begin(layout)
        if not self._awaits_sizes:
            for bucket in layout.buckets[:NUM_BUFFERS]:
                self._broadcasts.start(bucket)
        return layout

    def receive(self, bucket: Bucket) -> torch.Tensor:
        size = bucket.num_bytes
        if self._awaits_sizes:
            size = self._channel.receive(self._broadcasts.phase(bucket.index))["bytes"]
            self._broadcasts.start(bucket if size == bucket.num_bytes else bucket.packed(size))
        self._broadcasts.wait(bucket.index)
        return self._broadcasts.buffer(bucket)[:size]

    def release(self, bucket: Bucket) -> None:
        self._broadcasts.device.synchronize()
        if not self._awaits_sizes and bucket.index + NUM_BUFFERS < len(self._layout.buckets):
            self._broadcasts.start(self._layout.buckets[bucket.index + NUM_BUFFERS])

    def finish(self, digests: Sequence[str]) -> str:
        self._broadcasts.finish()
        return verify(self._channel, self._layout, digests, self._rank)

    def close(self) -> None:
        self._channel.close()
        self._broadcasts.close()


def found_group(channels: Receivers, transport: Transport, device: Device, phase: str) -> HandmadeGroup:
    """Join a group as rank 0, with the receivers in the order of their ranks.

    Args:
        channels: Channels to the receivers.
        transport: Transfer settings.
        device: Device of this process.
        phase: Phase, for errors.
    """
    host, size = host_and_port(transport.address)[0], len(channels) + 1
    store = listening_store(host, transport.timeout_s)
    for place, channel in enumerate(channels.values(), start=1):
        channel.send({"store": store.port, "size": size, "rank": place}, _JOINING)
    join = partial(_group, store, 0, size, device, host, transport.timeout_s)
    return _joined(join, device, phase, channels.check, transport.timeout_s)


def join_offered(channel: Channel, transport: Transport, device: Device, phase: str) -> tuple[HandmadeGroup, int]:
    """Join a group that the process at the other end of a channel founds; returns this process's rank in it too."""
    host, offer = host_and_port(transport.address)[0], channel.receive(phase)

    def join() -> Any:
        timeout = timedelta(seconds=transport.timeout_s)
        store = dist.TCPStore(host, offer["store"], is_master=False, wait_for_workers=False, timeout=timeout)
        return _group(store, offer["rank"], offer["size"], device, channel.local_host, transport.timeout_s)

    return _joined(join, device, phase, channel.check, transport.timeout_s), offer["rank"]


def _group(store: Any, rank: int, size: int, device: Device, host: str, timeout_s: float) -> Any:
    """Return a process group apart from the default one, which this process may lack or have for other ranks."""
    prefixed = dist.PrefixStore("weights", store)
    if device.collectives == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # It is later than our own deadlines, as NCCL's watchdog ends the process.
        options._timeout = timedelta(seconds=2 * timeout_s + _GRACE_S)
        group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        # Otherwise the first broadcast would connect the ranks, on the device that is current in its thread.
        group.eager_connect_single_device(device.torch_device)
        return group
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # The default of a process with a model is to connect lazily, and gloo crashes if the two ends differ.
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(prefixed, rank, size, options)


def listening_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Return a store that this process serves on one address of its node; by default torch listens on all of them."""
    listener = listen_at(host, 0)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _joined(
    join: Callable[[], Any], device: Device, phase: str, check: Callable[[str], None], timeout_s: float
) -> HandmadeGroup:
    """Return the group that `join` joins, in a thread: torch would wait for a lost peer until its time-out."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(join())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            outcome.set_exception(error)

    deadline = Deadline(timeout_s, phase)
    threading.Thread(target=run, name="join", daemon=True).start()
    while not wait([outcome], deadline.slice()).done:
        check(phase)
    with _naming_peers(phase, check, deadline):
        return HandmadeGroup(outcome.result(), device, timeout_s=timeout_s, check=check)


@contextmanager
def _naming_peers(phase: str, check: Callable[[str], None], deadline: Deadline) -> Iterator[None]:
    """Name the phase of a collective that failed, and the peer at fault.

    torch raises the same RuntimeError for a lost peer and for a time-out, and does not show which.
    """
    try:
        yield
    except RuntimeError as error:
        end = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < end:
            check(phase)
            deadline.remaining()
            time.sleep(_POLL_S)
        raise WeightSyncError(f"{phase} failed: {error}") from error


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port where a collective transport meets; `ValueError` if its address has neither."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"a collective transport meets at host:port, got {address!r}")
    return host, int(port)
