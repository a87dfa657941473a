"""The sending end of a weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import DTYPES, Bucket, Slot, lay_out
from rl_core.torch.transport.collective import CollectiveSenderLink
from rl_core.torch.transport.deadline import interruptible
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.torch.transport.disk import DiskSenderLink
from rl_core.torch.transport.ipc import IpcSenderLink
from rl_core.torch.transport.link import SenderLink
from rl_core.weights import Digests, Manifest, Transport, verify_receipt


class Sender:
    """Takes the tensors of a manifest in its order and sees them to every receiver."""

    def __init__(self, manifest: Manifest, layout: list[Bucket], link: SenderLink) -> None:
        self._manifest = manifest
        self._link = link
        self._places = iter([(bucket, slot) for bucket in layout for slot in bucket.slots])
        self._next = next(self._places, None)
        self._buffer: torch.Tensor | None = None
        self._pending: dict[str, PendingDigest] = {}
        self._digests: dict[str, str] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send this tensor next; its memory may be reused on return.

        Raises:
            WeightSyncError: where the manifest has another tensor, shape or dtype here, a receiver is gone, or time
                ran out.
        """
        bucket, slot = self._expect(name, tensor)
        if self._buffer is None:
            self._buffer = self._link.buffer(bucket)
        with torch.no_grad():
            slot.view(self._buffer).copy_(tensor)
            self._pending[name] = begin_digest(tensor)
        if slot is bucket.slots[-1]:
            self._link.send(bucket)
            self._digests.update(zip(self._pending, read_digests(list(self._pending.values())), strict=True))
            self._pending.clear()
            self._buffer = None
        self._next = next(self._places, None)

    def finish(self) -> Digests:
        """Wait until every receiver has everything and check it; the digests of what was sent.

        Raises:
            WeightSyncError: naming tensors that were never put, or that arrived broken.
        """
        put = {*self._digests, *self._pending}
        missing = [spec.name for spec in self._manifest.tensors if spec.name not in put]
        if missing:
            raise WeightSyncError(f"the sender left out {', '.join(missing)}", tuple(missing))
        for rank, received in self._link.finish().items():
            verify_receipt(self._manifest, self._digests, received, f"receiver rank {rank}")
        return dict(self._digests)

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


@contextmanager
def open_sender(
    manifest: Manifest, transport: Transport, device: Device, *, num_receivers: int | None = None
) -> Iterator[Sender]:
    """Meet the receivers, then send.

    Args:
        device: where the buckets lie; on `cuda` they travel by CUDA IPC or NCCL.
        num_receivers: receivers of this sender, where `ipc` has a sender on every node or GPU; all of the transport's
            where unset.

    Raises:
        WeightSyncError: where receivers do not come within `transport.timeout_s`, or expect other tensors.
    """
    layout = lay_out(manifest, transport.bucket_bytes)
    count = transport.num_receivers if num_receivers is None else num_receivers
    with interruptible(transport):
        link = _link(manifest, layout, transport, device, count)
        try:
            yield Sender(manifest, layout, link)
        except BaseException as error:
            link.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            link.close()


def _link(
    manifest: Manifest, layout: list[Bucket], transport: Transport, device: Device, num_receivers: int
) -> SenderLink:
    match transport.kind:
        case "ipc":
            return IpcSenderLink(manifest, layout, transport, device, num_receivers)
        case "collective":
            return CollectiveSenderLink(manifest, layout, transport, device, num_receivers)
        case "disk":
            return DiskSenderLink(manifest, layout, transport, num_receivers)
