"""A receiving end of weight transfers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import DTYPES, Layout, Parts, lay_out
from rl_core.torch.transport.changes import ChangesReceiverLink
from rl_core.torch.transport.collective import CollectiveReceiverLink
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.torch.transport.disk import DiskReceiverLink
from rl_core.torch.transport.ipc import IpcReceiverLink
from rl_core.torch.transport.link import ReceiverLink, root_digest
from rl_core.weights import Manifest, Transport, num_bytes

NAN_BYTE = 0xFF
"""A floating-point value of such bytes is not a number."""


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
        pending: list[PendingDigest] = []
        for bucket in self._layout.buckets:
            buffer = self._link.receive(bucket)
            pending.append(begin_digest(buffer[: bucket.num_bytes]))
            for slot in bucket.slots:
                if slot.parts is None:
                    yield slot.spec.name, slot.view(buffer)
                    continue
                size = num_bytes(slot.spec)
                if self._whole.numel() < size:
                    self._whole = torch.empty(size, dtype=torch.uint8, device=buffer.device)
                place = self._whole[:size].fill_(NAN_BYTE)
                whole = place.view(DTYPES[slot.spec.dtype]).view(slot.spec.shape)
                slot.put_into(whole, buffer)
                yield slot.spec.name, whole
            self._link.release(bucket)
        digests = read_digests(pending)
        self._link.finish(digests)
        self.digest = root_digest(digests)


class ReceivingEnd:
    """The connection over which a process receives weights, kept from one transfer to the next.

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
        layout = lay_out(manifest, transport.bucket_bytes).keeping(parts)
        if self._link is None or self._key != (transport, rank):
            self.close()
            self._link, self._key = _link(transport, rank, self._device, parts), (transport, rank)
        link = self._link
        try:
            link.begin(layout)
            receiver = Receiver(layout, link)
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
    match transport.kind:
        case "ipc":
            link: ReceiverLink = IpcReceiverLink(transport, rank, device)
        case "collective":
            link = CollectiveReceiverLink(transport, rank, device, parts)
        case "disk":
            link = DiskReceiverLink(transport, rank, device.torch_device)
    return ChangesReceiverLink(link, rank) if transport.sends_changes else link
