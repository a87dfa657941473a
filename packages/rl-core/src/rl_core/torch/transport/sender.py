"""The sending end of weight transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import DTYPES, Layout, lay_out
from rl_core.torch.transport.changes import ChangesSenderLink
from rl_core.torch.transport.channel import interruptible
from rl_core.torch.transport.collective import collective_sender_links
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.torch.transport.disk import DiskSenderLink
from rl_core.torch.transport.ipc import IpcSenderLink
from rl_core.torch.transport.link import SenderLink, root_digest
from rl_core.weights import Manifest, Transport


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
        self._link = link
        self._layout = layout
        self._buffer: torch.Tensor | None = None
        self._pending: list[PendingDigest] = []
        self.num_bytes_sent = 0

    def put(self, bucket_index: int, slot_index: int, tensor: torch.Tensor) -> None:
        bucket = self._layout.buckets[bucket_index]
        if self._buffer is None:
            self._buffer = self._link.buffer(bucket)
        bucket.slots[slot_index].fill(self._buffer, tensor)
        if slot_index == len(bucket.slots) - 1:
            bucket.clear_gaps(self._buffer)
            self._pending.append(begin_digest(self._buffer[: bucket.num_bytes]))
            self.num_bytes_sent += self._link.send(bucket)
            self._buffer = None

    def finish(self) -> str:
        digests = read_digests(self._pending)
        self._link.finish(digests)
        return root_digest(digests)


class SendingEnd:
    """The connection over which a process sends weights, kept from one transfer to the next.

    It is opened by the first transfer, replaced by one with another transport, and closed by a transfer that fails.

    Args:
        device: That holds the buckets; on a GPU they travel by CUDA IPC or NCCL.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._transport: Transport | None = None
        self._links: list[SenderLink] = []

    @contextmanager
    def transfer(self, manifest: Manifest, transport: Transport) -> Iterator[Sender]:
        """Meet the receivers, unless they are connected already, then send. What is brought together before the first
        `put` is so while they make ready.

        Raises:
            WeightSyncError: If receivers do not come within `transport.timeout_s`.
        """
        layout = lay_out(manifest, transport.bucket_bytes)
        with interruptible(transport):
            if self._transport != transport:
                self.close()
                self._links, self._transport = _links(transport, self._device), transport
            links = self._links
            try:
                sender = Sender(manifest, layout, links)
                yield sender
                if not sender.finished:
                    raise WeightSyncError("the sender left before the last tensor")
            except BaseException as error:
                for link in links:
                    link.abort(f"{type(error).__name__}: {error}")
                self.close()
                raise

    def close(self) -> None:
        """End the connection and free what it needed."""
        links, self._links, self._transport = self._links, [], None
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
            links = [IpcSenderLink(transport, device)]
        case "collective":
            links = [*collective_sender_links(transport, device)]
        case "disk":
            links = [DiskSenderLink(transport)]
    return [ChangesSenderLink(link, device) for link in links] if transport.sends_changes else links
