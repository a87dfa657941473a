"""Transfers of only what differs from the one before over the same connection, exact to the bit.

Both ends keep every bucket as it was last sent, in host memory. If few values of a bucket have changed, their
positions and new values travel, otherwise the whole bucket; the receiving end completes it before it is read or its
digest is taken. Another connection, which a receiver that is restarted or joins needs, begins with whole buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Bucket, Layout
from rl_core.torch.transport.link import ReceiverLink, SenderLink
from rl_core.weights import ITEM_BYTES

BLOCK = 2**16
"""Values whose positions are counted from one start, so that a position takes two bytes."""

BASE_BYTES = 8
MIN_LANE = 2
"""Bytes of the smallest values that are compared one by one."""
LANES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers for the comparison of buckets, by their bytes: bits differ also if floating-point values are equal."""


class ChangesSenderLink:
    """A `SenderLink` that hands another one only the changes of a bucket, if those are smaller."""

    def __init__(self, link: SenderLink, device: Device) -> None:
        self._link = link
        self.abort, self.close = link.abort, link.close
        self._device = device
        self._sent = KeptBytes()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def begin(self, layout: Layout) -> Layout:
        layout = self._link.begin(layout)
        self._sent.begin(layout.buckets, layout.fingerprint)
        self._buffer = torch.empty(layout.capacity, dtype=torch.uint8, device=self._device.torch_device)
        return layout

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._buffer

    def send(self, bucket: Bucket) -> int:
        whole = self._buffer[: bucket.num_bytes]
        before = self._sent.get(bucket.index, whole.device)
        changes = None if before is None else pack(whole, before, _lane(bucket), self._sent.base)
        self._sent.keep(bucket.index, whole)
        travels = whole if changes is None else changes
        self._link.buffer(bucket)[: travels.numel()].copy_(travels)
        return self._link.send(bucket if changes is None else bucket.packed(changes.numel()))

    def finish(self, digests: Sequence[str]) -> None:
        self._buffer = self._buffer.new_empty(0)
        self._link.finish(digests)
        self._sent.finish()


class ChangesReceiverLink:
    """A `ReceiverLink` that completes buckets when another one receives only their changes."""

    def __init__(self, link: ReceiverLink, rank: int) -> None:
        self._link = link
        self.release, self.abort, self.close = link.release, link.abort, link.close
        self._rank = rank
        self._received = KeptBytes()

    def begin(self, layout: Layout) -> Layout:
        layout = self._link.begin(layout)
        self._received.begin(layout.buckets, layout.fingerprint)
        return layout

    def receive(self, bucket: Bucket) -> torch.Tensor:
        arrived = self._link.receive(bucket)
        if arrived.numel() == bucket.num_bytes:
            self._received.keep(bucket.index, arrived)
            return arrived
        whole = self._received.get(bucket.index, arrived.device)
        if whole is None or self._received.base != base_of(arrived):
            raise WeightSyncError(
                f"receiver rank {self._rank} was sent the changes since a version that it does not hold", bucket.names
            )
        if not unpack(arrived, whole, _lane(bucket)):
            raise WeightSyncError(f"receiver rank {self._rank}: the changes of a bucket arrived broken", bucket.names)
        self._received.keep(bucket.index, whole)
        return whole

    def finish(self, digests: Sequence[str]) -> str:
        digest = self._link.finish(digests)
        self._received.finish()
        return digest


class ChangedLanes:
    """Messages between ranks as they were last sent and received; only their changes travel, if those are smaller."""

    def __init__(self) -> None:
        self._sent, self._received = KeptBytes(), KeptBytes()

    def begin(self, plan: object, version: str) -> None:
        """Begin a transfer; messages of another plan are of no use to it."""
        self._sent.begin(plan, version)
        self._received.begin(plan, version)

    def packed(self, lane: Hashable, whole: torch.Tensor) -> torch.Tensor:
        """Return what is to travel of a message, uint8: its changes, or all of it."""
        before = self._sent.get(lane, whole.device)
        changes = None if before is None else pack(whole, before, MIN_LANE, self._sent.base)
        self._sent.keep(lane, whole)
        return whole if changes is None else changes

    def put_into(self, whole: torch.Tensor, lane: Hashable, arrived: torch.Tensor) -> None:
        """Fill a message with what has arrived of it. Broken changes leave it with other digests than the sender's."""
        if arrived.numel() == whole.numel():
            whole.copy_(arrived)
        else:
            arrived = arrived.clone()  # Changes of any length precede it, and it begins with 8 bytes of a number.
            before = self._received.get(lane, whole.device)
            if before is None or self._received.base != base_of(arrived) or not unpack(arrived, before, MIN_LANE):
                return
            whole.copy_(before)
        self._received.keep(lane, whole)

    def finish(self) -> None:
        """Mark all messages as belonging to this transfer's version."""
        self._sent.finish()
        self._received.finish()


class KeptBytes:
    """Buckets or messages of the last transfer, in host memory, each by a key."""

    def __init__(self) -> None:
        self._of: object = None
        self._version = "0"
        self._kept: dict[Hashable, torch.Tensor] = {}
        self.base = 0

    def begin(self, of: object, version: str) -> None:
        """Begin a transfer; values kept of other buckets or messages are dropped.

        Args:
            of: All that will be kept.
            version: Hexadecimal number that differs between transfers, the same at both ends.
        """
        if of != self._of:
            self._kept.clear()
        self._of, self._version = of, version

    def get(self, key: Hashable, device: torch.device) -> torch.Tensor | None:
        """Return the bytes as they were last sent, uint8 on this device; on the host the kept memory itself."""
        kept = self._kept.get(key)
        return None if kept is None else kept.to(device)

    def keep(self, key: Hashable, whole: torch.Tensor) -> None:
        """Keep these bytes in place of those before."""
        kept = self._kept.setdefault(key, torch.empty(whole.numel(), dtype=torch.uint8))
        if kept.data_ptr() != whole.data_ptr():
            kept.copy_(whole)

    def finish(self) -> None:
        """Mark everything as belonging to this transfer's version."""
        self.base = int(self._version, 16) - 2**63


def pack(whole: torch.Tensor, before: torch.Tensor, lane: int, base: int) -> torch.Tensor | None:
    """Return the changes of a bucket.

    Args:
        whole: Uint8, the bucket's bytes.
        before: Those before.
        lane: Bytes of one value: 2, 4 or 8.
        base: Number of the version before.

    Returns:
        uint8: the base, the number of changed values in each block, the values, and each one's position in its block;
        None if that takes as much as the whole.
    """
    new = whole.view(LANES[lane])
    differs = new != before.view(LANES[lane])
    count, start = int(differs.count_nonzero()), _start(len(new))
    size = start + count * (lane + 2)
    if size >= len(whole):
        return None
    positions = differs.nonzero().flatten()
    packed = torch.zeros(size, dtype=torch.uint8, device=whole.device)
    packed[:BASE_BYTES].view(torch.int64).fill_(base)
    counts = torch.bincount(positions // BLOCK, minlength=-(-len(new) // BLOCK))
    packed[BASE_BYTES : BASE_BYTES + 4 * len(counts)].view(torch.int32).copy_(counts)
    packed[start : start + count * lane].view(LANES[lane]).copy_(new[positions])
    packed[start + count * lane :].view(torch.int16).copy_(positions % BLOCK - BLOCK // 2)
    return packed


def base_of(packed: torch.Tensor) -> int:
    """Return the number of the version that the changes are relative to."""
    return int(packed[:BASE_BYTES].view(torch.int64))


def unpack(packed: torch.Tensor, whole: torch.Tensor, lane: int) -> bool:
    """Apply the changes of `pack` to the bytes before, in place; returns whether they are intact as far as it shows."""
    values = whole.view(LANES[lane])
    start = _start(len(values))
    count = (len(packed) - start) // (lane + 2)
    counts = packed[BASE_BYTES : BASE_BYTES + 4 * -(-len(values) // BLOCK)].view(torch.int32).long()
    if int(counts.sum()) != count or bool((counts < 0).any()):
        return False
    blocks = torch.arange(len(counts), device=packed.device).repeat_interleave(counts, output_size=count)
    offsets = packed[start + count * lane :].view(torch.int16).long() + BLOCK // 2
    positions = blocks * BLOCK + offsets
    if bool((positions >= len(values)).any()):
        return False
    values[positions] = packed[start : start + count * lane].view(LANES[lane])
    return True


def _start(num_values: int) -> int:
    """Return the bytes before the values, which begin at a multiple of 8."""
    num_blocks = -(-num_values // BLOCK)
    return BASE_BYTES + -(-4 * num_blocks // 8) * 8


def _lane(bucket: Bucket) -> int:
    """Return the bytes of the bucket's smallest values, at least `MIN_LANE`."""
    return max(MIN_LANE, min(ITEM_BYTES[slot.spec.dtype] for slot in bucket.slots))
