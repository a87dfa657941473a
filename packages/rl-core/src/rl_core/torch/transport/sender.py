"""The sending end of weight transfers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import DTYPES, Bucket, Layout, Slot, lay_out
from rl_core.torch.transport.changes import ChangesSenderLink
from rl_core.torch.transport.collective import CollectiveSenderLink
from rl_core.torch.transport.deadline import interruptible
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.torch.transport.disk import DiskSenderLink
from rl_core.torch.transport.ipc import IpcSenderLink
from rl_core.torch.transport.link import SenderLink
from rl_core.torch.transport.receipt import root_digest
from rl_core.weights import Manifest, Transport


class Sender:
    """Takes the tensors of a manifest in its order and sees them to every receiver.

    Args:
        manifest: what will be put.
        layout: of the manifest.
        link: over which the buckets travel.

    Attributes:
        num_bytes_sent: bytes that each receiver was sent so far.
    """

    def __init__(self, manifest: Manifest, layout: Layout, link: SenderLink) -> None:
        self._manifest = manifest
        self._layout = layout
        self.link = link
        self._places = iter([(bucket, slot) for bucket in layout.buckets for slot in bucket.slots])
        self._next = next(self._places, None)
        self._buffer: torch.Tensor | None = None
        self._pending: list[PendingDigest] = []
        self._num_put = 0
        self._has_begun = False
        self.finished = False
        self.num_bytes_sent = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send this tensor next; its memory may be reused on return.

        Raises:
            WeightSyncError: if the manifest has another tensor, shape or dtype here, a receiver is gone or expects
                other tensors, or time ran out.
        """
        bucket, slot = self._expect(name, tensor)
        self._begin()
        if self._buffer is None:
            self._buffer = self.link.buffer(bucket)
        with torch.no_grad():
            slot.view(self._buffer).copy_(tensor)
        if slot is bucket.slots[-1]:
            bucket.clear_gaps(self._buffer)
            self._pending.append(begin_digest(self._buffer[: bucket.num_bytes]))
            self.num_bytes_sent += self.link.send(bucket)
            self._buffer = None
        self._num_put += 1
        self._next = next(self._places, None)

    def finish(self) -> str:
        """Wait until every receiver has everything as it was sent; returns the digest of all of it.

        Raises:
            WeightSyncError: naming tensors that were never put, or those of buckets that arrived broken.
        """
        missing = tuple(spec.name for spec in self._manifest.tensors[self._num_put :])
        if missing:
            raise WeightSyncError(f"the sender left out {', '.join(missing)}", missing)
        self._begin()
        digests = read_digests(self._pending)
        self.link.finish(digests)
        self.finished = True
        return root_digest(digests)

    def _begin(self) -> None:
        """Wait until every receiver is ready for the same transfer."""
        if not self._has_begun:
            self.link.begin(self._layout)
            self._has_begun = True

    def _expect(self, name: str, tensor: torch.Tensor) -> tuple[Bucket, Slot]:
        if self._next is None:
            raise WeightSyncError(f"the sender put {name} after the manifest's last tensor", (name,))
        bucket, slot = self._next
        spec = slot.spec
        if name != spec.name:
            raise WeightSyncError(f"the sender put {name} where the manifest has {spec.name}", (name, spec.name))
        if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
            got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            raise WeightSyncError(f"{name} is {got}; the manifest says {spec.dtype} {spec.shape}", (name,))
        return bucket, slot


class SendingEnd:
    """The connection over which a process sends weights, kept from one transfer to the next.

    It is opened by the first transfer, replaced by one with another transport, and closed by a transfer that fails.

    Args:
        device: that holds the buckets; on a GPU they travel by CUDA IPC or NCCL.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._transport: Transport | None = None
        self._link: SenderLink | None = None

    @contextmanager
    def transfer(self, manifest: Manifest, transport: Transport) -> Iterator[Sender]:
        """Meet the receivers, unless they are connected already, then send. What is brought together before the first
        `put` is so while they make ready.

        Raises:
            WeightSyncError: if receivers do not come within `transport.timeout_s`.
        """
        layout = lay_out(manifest, transport.bucket_bytes)
        with interruptible(transport):
            link = self._connected(transport)
            try:
                sender = Sender(manifest, layout, link)
                yield sender
                if not sender.finished:
                    raise WeightSyncError("the sender left before the last tensor")
            except BaseException as error:
                link.abort(f"{type(error).__name__}: {error}")
                self.close()
                raise

    def close(self) -> None:
        """End the connection and free what it needed."""
        link, self._link, self._transport = self._link, None, None
        if link is not None:
            link.close()

    def _connected(self, transport: Transport) -> SenderLink:
        if self._link is None or self._transport != transport:
            self.close()
            self._link = _link(transport, self._device)
            self._transport = transport
        return self._link


@contextmanager
def open_sender(manifest: Manifest, transport: Transport, device: Device) -> Iterator[Sender]:
    """One transfer as the sender over a connection of its own; see `SendingEnd.transfer`."""
    with closing(SendingEnd(device)) as end, end.transfer(manifest, transport) as sender:
        yield sender


def _link(transport: Transport, device: Device) -> SenderLink:
    link = _whole_link(transport, device)
    return ChangesSenderLink(link, device) if transport.sends_changes else link


def _whole_link(transport: Transport, device: Device) -> SenderLink:
    match transport.kind:
        case "ipc":
            return IpcSenderLink(transport, device)
        case "collective":
            return CollectiveSenderLink(transport, device)
        case "disk":
            return DiskSenderLink(transport)
