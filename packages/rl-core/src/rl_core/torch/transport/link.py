"""Ends of a connection for buckets, and the comparison of sent buckets with received ones.

They compare one digest, and the digests of single buckets only if it differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch

from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Bucket, Layout, Parts, digest_of
from rl_core.torch.transport.channel import Channel, Receivers

PHASE = "digests"


class SenderLink(Protocol):
    """The sending end of a connection. Every method raises `WeightSyncError` on a time-out or if a receiver is gone."""

    def begin(self, layout: Layout) -> Layout:
        """Begin a transfer, once every receiver is ready for the same one; returns the layout with the parts that these
        receivers keep.
        """

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """Return a uint8 buffer to fill with this bucket, once no receiver reads it any more."""

    def send(self, bucket: Bucket) -> int:
        """Let the filled bucket go, or its changes (`Bucket.packed`); returns the bytes that each receiver gets, before
        they have arrived.
        """

    def finish(self, digests: Sequence[str]) -> None:
        """Wait until every receiver has every bucket with these digests.

        Raises:
            WeightSyncError: Naming the tensors of buckets that arrived otherwise.
        """

    def abort(self, reason: str) -> None:
        """Tell the receivers that nothing more will come."""

    def close(self) -> None:
        """End the connection and free what it needed."""


class ReceiverLink(Protocol):
    """A receiving end of a connection. Every method raises `WeightSyncError` on a time-out or if the sender is gone."""

    def begin(self, layout: Layout) -> Layout:
        """Begin a transfer: tell the sender what this receiver is ready for, and the parts that it keeps; returns the
        layout with the buckets that the sender fills.
        """

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes that have arrived of this bucket, uint8: all of them, or its changes."""

    def release(self, bucket: Bucket) -> None:
        """Let the bucket's buffer be written again."""

    def finish(self, digests: Sequence[str]) -> str:
        """Compare the received buckets with the sent ones; returns one digest of everything as it arrived, which the
        sending side knows too.

        Raises:
            WeightSyncError: Naming the tensors of buckets that arrived otherwise.
        """

    def abort(self, reason: str) -> None:
        """Tell the sender that this receiver has given up."""

    def close(self) -> None:
        """End the connection and free what it needed."""


def root_digest(digests: Sequence[str], parts: Parts | None = None) -> str:
    """Return one digest of the digests of all buckets in order.

    Args:
        digests: Digests of the buckets.
        parts: Parts of the tensors that the buckets have, whose own digest then comes first.
    """
    root = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]
    return f"{digest_of(parts)}-{root}" if parts else root


def confirm(channels: Receivers, layout: Layout, digests: Sequence[str]) -> None:
    """Tell every receiver the root digest as the sender, and wait until each has agreed.

    Raises:
        WeightSyncError: Naming receiver and tensors, if something arrived otherwise.
    """
    channels.send({"root": root_digest(digests)}, PHASE)
    for rank, channel in channels.items():
        answer = channel.receive(PHASE)
        if "received" in answer:
            channel.send({"sent": list(digests)}, PHASE)
            compare(layout, digests, answer["received"], f"receiver rank {rank}")


def verify(channel: Channel, layout: Layout, digests: Sequence[str], rank: int) -> str:
    """Agree with the sender's root digest as a receiver, or find the buckets that differ; returns the digest.

    Raises:
        WeightSyncError: Naming the tensors of those buckets.
    """
    phase = f"receiver rank {rank}, {PHASE}"
    if channel.receive(phase)["root"] == root_digest(digests):
        channel.send({"agreed": True}, phase)
    else:
        channel.send({"received": list(digests)}, phase)
        compare(layout, channel.receive(phase)["sent"], digests, f"receiver rank {rank}")
    return root_digest(digests, layout.parts)


def compare(layout: Layout, sent: Sequence[str], received: Sequence[str], receiver: str) -> None:
    """Raise a `WeightSyncError` that lists every tensor of the buckets whose digests differ."""
    pairs = zip(layout.buckets, sent, received, strict=True)
    names = tuple(slot.spec.name for bucket, ours, theirs in pairs if ours != theirs for slot in bucket.slots)
    if names:
        raise WeightSyncError(
            f"what arrived at {receiver} differs from what was sent, in the buckets of {', '.join(names)}", names
        )
