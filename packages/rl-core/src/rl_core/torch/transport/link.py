"""Connections over which buckets travel: one class per kind of transport on either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rl_core.torch.transport.bucket import Bucket, Layout


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

    def begin(self, layout: Layout) -> None:
        """Begin a transfer: tell the sender what this receiver is ready for, and the parts that it keeps."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes that have arrived of this bucket, uint8: all of them, or its changes."""

    def release(self, bucket: Bucket) -> None:
        """The bucket's buffer may be written again."""

    def finish(self, digests: Sequence[str]) -> None:
        """Compare what arrived with what was sent.

        Raises:
            WeightSyncError: Naming the tensors of buckets that arrived otherwise.
        """

    def abort(self, reason: str) -> None:
        """Tell the sender that this receiver has given up."""

    def close(self) -> None:
        """End the connection and free what it needed."""
