"""The comparison of what was sent with what arrived: one digest, and those of single buckets only if it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Layout
from rl_core.torch.transport.channel import Channel

PHASE = "digests"


def root_digest(digests: Sequence[str]) -> str:
    """Return one digest of the digests of all buckets in order."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


def confirm(channels: Mapping[int, Channel], layout: Layout, digests: Sequence[str]) -> None:
    """The sender's part: tell every receiver the root digest, and wait until each has agreed.

    Raises:
        WeightSyncError: Naming receiver and tensors, if something arrived otherwise.
    """
    for channel in channels.values():
        channel.send({"root": root_digest(digests)}, PHASE)
    for rank, channel in channels.items():
        answer = channel.receive(PHASE)
        if "received" in answer:
            channel.send({"sent": list(digests)}, PHASE)
            compare(layout, digests, answer["received"], f"receiver rank {rank}")


def verify(channel: Channel, layout: Layout, digests: Sequence[str], rank: int) -> None:
    """A receiver's part: agree with the sender's root digest, or find the buckets that differ.

    Raises:
        WeightSyncError: Naming the tensors of those buckets.
    """
    phase = f"receiver rank {rank}, {PHASE}"
    if channel.receive(phase)["root"] == root_digest(digests):
        channel.send({"agreed": True}, phase)
        return
    channel.send({"received": list(digests)}, phase)
    compare(layout, channel.receive(phase)["sent"], digests, f"receiver rank {rank}")


def compare(layout: Layout, sent: Sequence[str], received: Sequence[str], receiver: str) -> None:
    """Raise a `WeightSyncError` that lists every tensor of the buckets whose digests differ."""
    pairs = zip(layout.buckets, sent, received, strict=True)
    names = tuple(slot.spec.name for bucket, ours, theirs in pairs if ours != theirs for slot in bucket.slots)
    if names:
        raise WeightSyncError(
            f"what arrived at {receiver} differs from what was sent, in the buckets of {', '.join(names)}", names
        )
