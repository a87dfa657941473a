"""The ends of weight transfers: a sender, and one of its receivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.apart import ApartLink
from rl_core.torch.transport.bucket import (
    DTYPES,
    ArrivedBucket,
    Bucket,
    Layout,
    Parts,
    exchanges_parts,
    in_boxes,
    layout_of,
)
from rl_core.torch.transport.changes import ChangedLanes, ChangesReceiverLink, ChangesSenderLink
from rl_core.torch.transport.channel import interruptible
from rl_core.torch.transport.collective import NUM_BUFFERS, CollectiveReceiverLink, collective_sender_links
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.torch.transport.disk import DiskReceiverLink, DiskSenderLink
from rl_core.torch.transport.exchange import Holdings, KeptPlan
from rl_core.torch.transport.ipc import IpcReceiverLink, IpcSenderLink
from rl_core.torch.transport.link import ReceiverLink, SenderLink, root_digest
from rl_core.weights import Manifest, Transport, num_bytes

Link = TypeVar("Link", bound="SenderLink | ApartLink")

NAN_BYTE = 0xFF
"""A floating-point value of such bytes is not a number."""


class Sender:
    """Takes the tensors of a manifest in its order and sees them to every receiver.

    Args:
        manifest: What will be put.
        layout: Layout of the manifest.
        links: Over which the buckets travel: one for each group of receivers that keep the same parts.

    Attributes:
        num_bytes_sent: Bytes that were sent so far, to each group once.
    """

    def __init__(self, manifest: Manifest, layout: Layout, links: Sequence[SenderLink]) -> None:
        self._manifest = manifest
        self._layout = layout
        self.links = list(links)
        self._streams: list[_Stream] = []
        self._places = iter([(bucket, index) for bucket in layout.buckets for index in range(len(bucket.slots))])
        self._next = next(self._places, None)
        self._num_put = 0
        self.finished = False

    @property
    def num_bytes_sent(self) -> int:
        return sum(stream.num_bytes_sent for stream in self._streams)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send this tensor next; its memory may be reused on return.

        Raises:
            WeightSyncError: If the manifest has another tensor, shape or dtype here, a receiver is gone or expects
                other tensors, or time ran out.
        """
        if self._next is None:
            raise WeightSyncError(f"the sender put {name} after the manifest's last tensor", (name,))
        bucket, slot = self._next
        spec = bucket.slots[slot].spec
        if name != spec.name:
            raise WeightSyncError(f"the sender put {name} where the manifest has {spec.name}", (name, spec.name))
        if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
            got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            raise WeightSyncError(f"{name} is {got}; the manifest says {spec.dtype} {spec.shape}", (name,))
        self._begin()
        with torch.no_grad():
            for stream in self._streams:
                stream.put(bucket.index, slot, tensor)
        self._num_put += 1
        self._next = next(self._places, None)

    def begin(self) -> Layout:
        """Wait until the receivers are ready, and return the layout with the parts that they keep; for a sender of one
        group, which `regroup`, `buffer` and `send` then serve instead of `put`."""
        self._begin()
        (stream,) = self._streams
        return stream.layout

    def regroup(self, buckets: Sequence[int]) -> Layout:
        """Send the tensors in other buckets, as `Layout.grouped`; returns the layout."""
        (stream,) = self._streams
        assert isinstance(stream.link, IpcSenderLink), "only ranks that share memory with their receivers do so"
        stream.layout = stream.link.regroup(buckets)
        return stream.layout

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer of the next bucket, to fill with its parts."""
        (stream,) = self._streams
        return stream.open(bucket)

    def send(self, bucket: Bucket) -> None:
        """Send a bucket that has been filled."""
        (stream,) = self._streams
        stream.send(bucket)
        self._num_put += len(bucket.slots)

    def finish(self) -> list[str]:
        """Wait until every receiver has everything as it was sent; returns the digest of all that each group got.

        Raises:
            WeightSyncError: Naming tensors that were never put, or tensors of buckets that arrived broken.
        """
        missing = tuple(spec.name for spec in self._manifest.tensors[self._num_put :])
        if missing:
            raise WeightSyncError(f"the sender omitted {', '.join(missing)}", missing)
        self._begin()
        digests = [stream.finish() for stream in self._streams]
        self.finished = True
        return digests

    def _begin(self) -> None:
        """Wait until every receiver is ready for the same transfer."""
        if not self._streams:
            self._streams = [_Stream(link, link.begin(self._layout)) for link in self.links]


class _Stream:
    """Fills the buckets of one link, with the parts that its receivers keep.

    Args:
        layout: Layout with the parts that its receivers keep.
    """

    def __init__(self, link: SenderLink, layout: Layout) -> None:
        self.link = link
        self.layout = layout
        self._buffer: torch.Tensor | None = None
        self._pending: list[PendingDigest] = []
        self.num_bytes_sent = 0

    def put(self, bucket_index: int, slot_index: int, tensor: torch.Tensor) -> None:
        bucket = self.layout.buckets[bucket_index]
        bucket.slots[slot_index].fill(self.open(bucket), tensor)
        if slot_index == len(bucket.slots) - 1:
            self.send(bucket)

    def open(self, bucket: Bucket) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = self.link.buffer(bucket)
        return self._buffer

    def send(self, bucket: Bucket) -> None:
        buffer = self.open(bucket)
        bucket.clear_gaps(buffer)
        self._pending.append(begin_digest(buffer[: bucket.num_bytes]))
        self.num_bytes_sent += self.link.send(bucket)
        self._buffer = None

    def finish(self) -> str:
        digests = read_digests(self._pending)
        self.link.finish(digests)
        return root_digest(digests, self.layout.parts)


class SendingEnd:
    """The connection over which a process sends weights, kept from one transfer to the next, without its buffers.

    It is opened by the first transfer, replaced by one with another transport, and closed by a transfer that fails.

    Args:
        device: That holds the buckets; on a GPU they travel by CUDA IPC or NCCL.

    Attributes:
        plan: Plan of the last exchange among senders; None before the first.
        lanes: Messages of that exchange.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._transport: Transport | None = None
        self._links: Sequence[SenderLink | ApartLink] = []
        self.plan: KeptPlan | None = None
        self.lanes = ChangedLanes()

    @contextmanager
    def transfer(self, manifest: Manifest, transport: Transport) -> Iterator[Sender]:
        """Meet the receivers, unless they are connected already, then send. What is brought together before the first
        `put` is so while they make ready.

        Raises:
            WeightSyncError: If receivers do not come within `transport.timeout_s`.
        """
        layout = layout_of(manifest, transport)
        with self._connected(transport, lambda: _links(transport, self._device)) as links:
            sender = Sender(manifest, layout, links)
            yield sender
            if not sender.finished:
                raise WeightSyncError("the sender left before the last tensor")

    def exchange(
        self, manifest: Manifest, transport: Transport, rank: int, num_ranks: int, holdings: Callable[[], Holdings]
    ) -> ApartLink:
        """Send from all ranks of a policy to engines on other devices the parts that these keep; collective.

        Args:
            manifest: Tensors of the transfer.
            transport: Transfer settings.
            rank: Rank of this process in the policy.
            num_ranks: Number of the policy's ranks.
            holdings: Returns the parts that this rank holds; called when all ranks are connected.

        Returns:
            The connection, after a transfer over it.

        Raises:
            WeightSyncError: If another rank or a receiver fails, or does not come within `transport.timeout_s`.
        """
        layout = layout_of(manifest, transport).keeping({spec.name: () for spec in manifest.tensors})
        with self._connected(transport, lambda: [ApartLink(transport, self._device, rank, num_ranks)]) as (link,):
            for bucket in link.begin(layout, holdings()).buckets:
                link.receive(bucket)
            link.finish()
        return link

    @contextmanager
    def _connected(self, transport: Transport, connect: Callable[[], Sequence[Link]]) -> Iterator[Sequence[Link]]:
        """Connect, unless this end is connected over the same transport; a failure ends the connection."""
        with interruptible(transport):
            if self._transport != transport:
                self.close()
                self._links, self._transport = connect(), transport
            links: Any = self._links
            try:
                yield links
            except BaseException as error:
                for link in links:
                    link.abort(f"{type(error).__name__}: {error}")
                self.close()
                raise

    def close(self) -> None:
        """End the connection and free what it needed."""
        links, self._links, self._transport = self._links, [], None
        self.lanes = ChangedLanes()
        for link in links:
            link.close()


@contextmanager
def open_sender(manifest: Manifest, transport: Transport, device: Device) -> Iterator[Sender]:
    """Send one transfer over its own connection; see `SendingEnd.transfer`."""
    with closing(SendingEnd(device)) as end, end.transfer(manifest, transport) as sender:
        yield sender


def _links(transport: Transport, device: Device) -> list[SenderLink]:
    links: list[SenderLink]
    match transport.kind:
        case "ipc":
            return [IpcSenderLink(transport, device)]
        case "collective":
            links = [*collective_sender_links(transport, device)]
        case "disk":
            links = [DiskSenderLink(transport)]
    return [ChangesSenderLink(link, device) for link in links] if transport.sends_changes else links


class Receiver:
    """Gives the tensors of a manifest in its order, as they arrive.

    A tensor is valid until the next is asked for: copy it before that, on the device's current stream. Where only parts
    of it travel the rest is not a number, or -1.

    Args:
        layout: Layout of the manifest.
        link: Over which the buckets arrive.

    Attributes:
        digest: Digest of everything as it arrived, before any conversion, equal to the digest of everything sent; empty
            before the end.
    """

    def __init__(self, layout: Layout, link: ReceiverLink) -> None:
        self._layout = layout
        self._link = link
        self.digest = ""
        self._whole = torch.empty(0, dtype=torch.uint8)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once.

        Raises:
            WeightSyncError: On a time-out, if the sender is gone, or naming the tensors of buckets that arrived broken.
        """
        for bucket, buffer in self._arriving():
            for slot in bucket.slots:
                if slot.parts is None:
                    view = slot.view(buffer).data  # It does not know the buffer as its base.
                    yield slot.spec.name, view
                    view.set_()  # Otherwise a reader that still has the last tensor would keep the buffer.
                    continue
                size = num_bytes(slot.spec)
                if self._whole.numel() < size:
                    self._whole = torch.full((size,), NAN_BYTE, dtype=torch.uint8, device=buffer.device)
                whole = self._whole[:size].view(DTYPES[slot.spec.dtype]).view(slot.spec.shape)
                slot.put_into(whole, buffer)
                yield slot.spec.name, whole
                # Only these parts were written, so the rest needs no filling.
                slot.take_out(whole)
            del buffer  # The link frees the memory when the transfer is finished.

    def by_bucket(self) -> Iterator[ArrivedBucket]:
        """Yield the tensors of one bucket after the other, without putting parts together; each is valid until the
        next. Raises as `__iter__`.
        """
        for bucket, buffer in self._arriving():
            arrived = ArrivedBucket(bucket, buffer)
            del buffer
            yield arrived
            arrived.leave()

    def _arriving(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket and its buffer, which is written again afterwards."""
        pending: list[PendingDigest] = []
        for bucket in self._layout.buckets:
            buffer = self._link.receive(bucket)
            pending.append(begin_digest(buffer[: bucket.num_bytes]))
            yield bucket, buffer
            del buffer
            self._link.release(bucket)
        self.digest = self._link.finish(read_digests(pending))


def receiver_bytes(largest: int, bucket_bytes: int, *, has_parts: bool) -> int:
    """Return the maximum number of bytes of device memory that a receiving end allocates for a transfer.

    Args:
        largest: Number of bytes of the largest tensor.
        bucket_bytes: Default size of a bucket; a larger tensor travels alone.
        has_parts: True if only parts of tensors travel. They are put together in another buffer, or come in messages,
            some of which the receiver passes on.
    """
    return (NUM_BUFFERS + has_parts) * max(bucket_bytes, largest)


class ReceivingEnd:
    """The connection over which a process receives weights, kept from one transfer to the next, without its buffers.

    It is opened by the first transfer, replaced by one with another transport, and closed by a transfer that fails.

    Args:
        device: At which the tensors arrive; if every rank sends, the sender is the one on the same device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._key: tuple[Transport, int] | None = None
        self._link: ReceiverLink | None = None

    @contextmanager
    def transfer(
        self, manifest: Manifest, transport: Transport, rank: int, parts: Parts | None = None
    ) -> Iterator[Receiver]:
        """Meet the sender, unless it is connected already, then receive.

        Args:
            manifest: Manifest of the transfer, equal to the sender's.
            transport: Transfer settings, the same on senders and receivers.
            rank: Rank of this receiver, 1-based.
            parts: That it keeps; a transport over which tensors travel apart brings it no others.

        Raises:
            WeightSyncError: If no sender comes within `transport.timeout_s`, or it sends other tensors.
        """
        parts = (parts or {}) if transport.sends_parts else {}
        if exchanges_parts(manifest, transport):
            parts = in_boxes(parts, {spec.name: spec.shape for spec in manifest.tensors})
        layout = layout_of(manifest, transport).keeping(parts)
        if self._link is None or self._key != (transport, rank):
            self.close()
            self._link, self._key = _link(transport, rank, self._device, parts), (transport, rank)
        link = self._link
        try:
            receiver = Receiver(link.begin(layout), link)
            yield receiver
            if not receiver.digest:
                raise WeightSyncError(f"receiver rank {rank} left before the last tensor")
        except BaseException as error:
            link.abort(f"{type(error).__name__}: {error}")
            self.close()
            raise

    def close(self) -> None:
        """End the connection and free what it needed."""
        link, self._link, self._key = self._link, None, None
        if link is not None:
            link.close()


@contextmanager
def open_receiver(
    manifest: Manifest, transport: Transport, rank: int, device: Device, parts: Parts | None = None
) -> Iterator[Receiver]:
    """Receive one transfer over its own connection; see `ReceivingEnd.transfer`."""
    with closing(ReceivingEnd(device)) as end, end.transfer(manifest, transport, rank, parts) as receiver:
        yield receiver


def _link(transport: Transport, rank: int, device: Device, parts: Parts) -> ReceiverLink:
    link: ReceiverLink
    match transport.kind:
        case "ipc":
            return IpcReceiverLink(transport, rank, device)
        case "collective" if transport.every_rank_sends:
            return ApartLink(transport, device, rank)
        case "collective":
            link = CollectiveReceiverLink(transport, rank, device, parts)
        case "disk":
            link = DiskReceiverLink(transport, rank, device.torch_device)
    return ChangesReceiverLink(link, rank) if transport.sends_changes else link
