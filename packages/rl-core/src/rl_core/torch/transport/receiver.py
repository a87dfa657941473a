"""A receiving end of a weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_core.devices import Device
from rl_core.torch.transport.bucket import Bucket, lay_out
from rl_core.torch.transport.collective import CollectiveReceiverLink
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.torch.transport.disk import DiskReceiverLink
from rl_core.torch.transport.ipc import IpcReceiverLink
from rl_core.torch.transport.link import ReceiverLink
from rl_core.weights import Digests, Manifest, Transport


class Receiver:
    """Gives the tensors of a manifest in its order, as they arrive.

    A tensor is valid until the next is asked for: copy it before that.
    """

    def __init__(self, layout: list[Bucket], link: ReceiverLink) -> None:
        self._layout = layout
        self._link = link
        self._digests: dict[str, str] = {}
        self.finished = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once; raises `WeightSyncError` on a time-out or where the sender is gone."""
        for bucket in self._layout:
            buffer = self._link.receive(bucket)
            pending: dict[str, PendingDigest] = {}
            for slot in bucket.slots:
                tensor = slot.view(buffer)
                pending[slot.spec.name] = begin_digest(tensor)
                yield slot.spec.name, tensor
            self._digests.update(zip(pending, read_digests(list(pending.values())), strict=True))
            self._link.release(bucket)
        self._link.finish(self._digests)
        self.finished = True

    @property
    def digests(self) -> Digests:
        """Of every tensor as it arrived, before any conversion; complete after the last one."""
        return dict(self._digests)


@contextmanager
def open_receiver(manifest: Manifest, transport: Transport, rank: int, device: Device) -> Iterator[Receiver]:
    """Meet the sender, then receive.

    Args:
        rank: of this receiver, 1-based.
        device: where the tensors arrive; if every rank sends, the sender is the one on the same device.

    Raises:
        WeightSyncError: where no sender comes within `transport.timeout_s`, or it sends other tensors.
    """
    layout = lay_out(manifest, transport.bucket_bytes)
    link: ReceiverLink
    match transport.kind:
        case "ipc":
            link = IpcReceiverLink(manifest, layout, transport, rank, device)
        case "collective":
            link = CollectiveReceiverLink(manifest, layout, transport, rank, device)
        case "disk":
            link = DiskReceiverLink(manifest, layout, transport, rank, device.torch_device)
    receiver = Receiver(layout, link)
    try:
        yield receiver
        if not receiver.finished:
            link.abort("left before the last tensor")
    except BaseException as error:
        link.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        link.close()
