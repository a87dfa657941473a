"""What carries the buckets: one class per transport kind on either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from rl_core.torch.transport.bucket import Bucket
from rl_core.weights import Digests


class SenderLink(Protocol):
    """The sending end. Every method raises `WeightSyncError` on a time-out or where a receiver is gone."""

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """A uint8 buffer to fill with this bucket, once no receiver reads it any more."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Let the filled bucket go; returns before it has arrived."""
        ...

    def finish(self) -> Mapping[int, Digests]:
        """Wait until every receiver has taken every bucket; what each says it received, by rank."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the receivers that nothing more will come."""
        ...

    def close(self) -> None:
        """Free what the transfer needed."""
        ...


class ReceiverLink(Protocol):
    """The receiving end. Every method raises `WeightSyncError` on a time-out or where the sender is gone."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """The uint8 buffer in which this bucket has arrived."""
        ...

    def release(self, bucket: Bucket) -> None:
        """The bucket's buffer may be written again."""
        ...

    def finish(self, digests: Digests) -> None:
        """Tell the sender what arrived."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the sender that this receiver takes no more."""
        ...

    def close(self) -> None:
        """Free what the transfer needed."""
        ...
