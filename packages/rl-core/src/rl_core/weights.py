"""Weights on their way from a policy to the generators: the manifest, the transport, the sender and the receiver."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rl_core.devices import CUDA

TransportKind = Literal["ipc", "collective", "disk"]
"""The way weights travel: CUDA's interprocess handles, collectives, or files."""
WeightSyncChoice = Literal["auto", "ipc", "collective", "disk"]
"""A kind of transport, or the one that fits the places of policy and generators."""
WeightSyncEncoding = Literal["full", "changes", "parts"]
"""Values that a weight update carries: all of them, only those that changed since the one before, or, of every tensor,
only the parts that each engine rank keeps, which the ranks of the policy exchange beforehand."""
WeightForm = Literal["merged", "factored", "adapter"]
"""Form of sent weights of a model with low-rank adapters: the adapters merged into the weights, the weights as they are
followed by the factors of the adapters, or only these factors. Without adapters there is only `merged`."""

WeightTarget = Literal["policy", "drafter"]
"""Model of a generator that weights are for: the one that it serves, or the one whose drafts that one verifies."""

MIN_SECRET_BYTES = 16
"""Minimum length of a transport's secret."""


@dataclass(frozen=True)
class TensorSpec:
    """Name (Hugging Face's), shape and dtype (`float32`, `bfloat16`, ...) of one tensor on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Every tensor of one weight version, in the order they are sent.

    Args:
        version: The weight version they make up.
        tensors: The tensors to send. A tied head is sent once, under the embedding's name, and named in `tied`.
        tied: Name of each tensor that is not sent to the name of the one it equals.
        num_factors: How many of the tensors, the last ones, are factors of low-rank adapters, which the receiver
            applies itself: `LAYER.lora_A.weight` `[dim, inputs]` and `LAYER.lora_B.weight` `[outputs, dim]`. If all
            are, the receiver keeps the weights that it has. 0 if adapters are merged into the weights.
        target: The generator's model that they are for.
        is_held_in_parts: True if each tensor consists of parts that ranks of the policy hold. If every rank sends,
            these parts travel instead of whole tensors.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    num_factors: int = 0
    target: WeightTarget = "policy"
    is_held_in_parts: bool = False

    @property
    def factors(self) -> tuple[TensorSpec, ...]:
        """Factors of low-rank adapters."""
        return self.tensors[len(self.tensors) - self.num_factors :]

    @property
    def form(self) -> WeightForm:
        """Form of the sent weights."""
        if not self.num_factors:
            return "merged"
        return "adapter" if self.num_factors == len(self.tensors) else "factored"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on the wire."""
        return sum(num_bytes(spec) for spec in self.tensors)

    def without_factors(self) -> Manifest:
        """Return the manifest of only the weights."""
        weights = self.tensors[: len(self.tensors) - self.num_factors]
        return replace(self, tensors=weights, num_factors=0)


@dataclass(frozen=True)
class Transport:
    """How weights travel; the same value goes to all senders and receivers.

    Both ends keep their connection and their buffers from one transfer to the next for as long as the transport is
    equal: after a failure, or with other receivers, the next transfer is planned with another address.

    Args:
        kind: `ipc` (shared memory, CUDA IPC), `collective` (gloo, NCCL) or `disk` (safetensors in `address`).
        address: Rendezvous `host:port` of the sender (`ipc`, `collective`), or a folder (`disk`).
        num_receivers: Receiving processes of one sender.
        bucket_bytes: Maximum number of bytes in flight at a time, a single larger tensor excepted.
        timeout_s: Bound of each phase; a timeout error has the rank and the phase.
        every_rank_sends: True if each rank of the policy sends: over `ipc` to its own receivers (on CUDA those on its
            GPU), over `collective` the parts that it holds to all receivers; otherwise rank 0 sends to all.
        sends_changes: True if only the changes since the last transfer travel, where they are smaller; both ends then
            keep the weights in host memory. Over `ipc`, whose receivers read the sender's memory, between the nodes of
            the senders.
        secret: Key that proves between senders and receivers that they belong to this transport, at least 16 bytes;
            random unless given. Only the processes of the run may know it.

    Raises:
        ValueError: If `sends_changes` is set for `ipc` with one sender, or the secret is too short.
    """

    kind: TransportKind
    address: str
    num_receivers: int
    bucket_bytes: int = CUDA.bucket_bytes
    timeout_s: float = 300.0
    every_rank_sends: bool = False
    sends_changes: bool = False
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"the secret of a transport must have at least {MIN_SECRET_BYTES} bytes, got {len(self.secret)}"
            )
        if self.sends_changes and self.kind == "ipc" and not self.every_rank_sends:
            raise ValueError("ipc sends changes only between ranks of a policy; one that sends alone shares its memory")

    @property
    def ends_meet(self) -> bool:
        """Return whether senders and receivers work at the same time; if not, the sender is done before receivers
        begin."""
        return self.kind != "disk"

    @property
    def sends_parts(self) -> bool:
        """Return whether a receiver is sent only the parts of tensors that it keeps. Receivers that share the memory or
        the files of one sender read the same whole tensors there.
        """
        return self.kind == "collective" or self.every_rank_sends


class WeightSource(Protocol):
    """One rank of the policy, as the sender of its weights. `manifest` and `send` are collective over its ranks."""

    def manifest(self, version: int, form: WeightForm = "merged") -> Manifest | None:
        """Return the manifest that `send` will follow, on rank 0; None on the others.

        Raises:
            ValueError: For another form than `merged` if the model has no adapters.
        """

    def send(self, manifest: Manifest, transport: Transport) -> Sequence[str]:
        """Send all tensors in the manifest's order; returns the digest of all that each group of receivers got, those
        that keep the same parts being one, and none on ranks that send nothing. A digest begins with a name of the
        parts and a dash, unless the group keeps everything whole.
        """

    def interrupt(self, transport: Transport, reason: str) -> None:
        """End this process's `send` over a transport soon, with a `WeightSyncError`; called by another thread."""


class WeightSink(Protocol):
    """A replica, as the receiver of weights. Calls come in this order, while the replica is paused."""

    async def begin(self, manifest: Manifest) -> None:
        """Prepare to receive; raises `WeightSyncError` naming engine parameters that the manifest leaves out, or
        tensors unknown to the engine.
        """

    async def receive(self, transport: Transport, first_rank: int) -> Sequence[str]:
        """Receive all tensors as receivers `first_rank`, `first_rank + 1`, ...; returns the digest of all that was
        received, per engine rank, which may be the parts of tensors that the rank keeps.

        Raises `WeightSyncError` naming tensors that differ from the sent ones, of one bucket or of several.
        """

    async def commit(self, version: int) -> None:
        """Check that the engine computes with the received tensors (packed copies, tied heads), then serve this
        version.

        Raises `WeightSyncError` naming the stale tensor; the replica then serves nothing until a transfer succeeds.
        """


def buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[list[TensorSpec]]:
    """Consecutive tensors of up to `bucket_bytes` together; a larger tensor travels alone."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in tensors:
        spec_bytes = num_bytes(spec)
        if bucket and size + spec_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec_bytes
    if bucket:
        yield bucket


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Bytes of one value by dtype."""


def num_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one tensor on the wire."""
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


@dataclass(frozen=True)
class WeightUpdate:
    """Weights that the policy has published under a version.

    Weights travel one way: the loop publishes an update and hands it down to the source of its rollouts and their pool,
    which has it sent to all its replicas, and again to those that it restarts. An update goes stale with the policy's
    next step: a version is sent exactly as it was published.

    Args:
        version: Version of the weights; versions increase.
        revision: Number of changes of the policy's weights until then, to recognise a stale update.
    """

    version: int
    revision: int = 0


class Weights(Protocol):
    """The publishing side of weight sync. Its state, saved with a checkpoint, is the last version given."""

    @property
    def version(self) -> int:
        """The last version given, which the policy's weights have until it steps; 0 before the first."""

    def publish(self) -> WeightUpdate:
        """Give the policy's present weights the next version."""

    def state(self) -> Mapping[str, Any]:
        """Plain data that `restore` resumes from."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
