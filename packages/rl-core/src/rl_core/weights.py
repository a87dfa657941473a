"""Weights on their way from a policy to the generators: what is sent, who sends, who receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rl_core.devices import CUDA
from rl_core.errors import WeightSyncError

TransportKind = Literal["ipc", "collective", "disk"]


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
        version: the weight version they make up.
        tensors: what will be sent. A tied head is sent once, under the embedding's name, and named in `tied`.
        tied: name of each tensor that is not sent to the name of the one it equals.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    tied: Mapping[str, str] = field(default_factory=dict)


Digests = Mapping[str, str]
"""Tensor name to digest, taken on the device by `rl_core.torch.transport.digest`."""


@dataclass(frozen=True)
class Peer:
    """One receiving process of a transport: a rank of a replica's engine.

    Args:
        rank: 1-based among all receivers (rank 0 is the sender).
        node: node id, to tell which sender shares its memory.
        device: GPU UUID, or `cpu`.
    """

    rank: int
    node: str
    device: str


@dataclass(frozen=True)
class Transport:
    """How one transfer runs; the same value goes to all senders and receivers.

    Args:
        kind: `ipc` (shared memory, CUDA IPC), `collective` (gloo, NCCL) or `disk` (safetensors in `address`).
        address: rendezvous `host:port` of the sender (`ipc`, `collective`), or a folder (`disk`).
        num_receivers: receiving processes of one sender.
        bucket_bytes: most bytes in flight at a time, a single larger tensor excepted.
        timeout_s: bound of each phase; a time-out names rank and phase.
        every_rank_sends: whether each rank of the policy has receivers of its own (`ipc` on CUDA: those on its GPU);
            otherwise rank 0 sends to all.
    """

    kind: TransportKind
    address: str
    num_receivers: int
    bucket_bytes: int = CUDA.bucket_bytes
    timeout_s: float = 300.0
    every_rank_sends: bool = False


class WeightSource(Protocol):
    """One rank of the policy, as the sender of its weights. `manifest` and `send` are collective over its ranks."""

    def manifest(self, version: int) -> Manifest:
        """What `send` will send."""
        ...

    def send(self, manifest: Manifest, transport: Transport) -> Digests:
        """Send all tensors in the manifest's order; the digests of what was sent (empty on ranks that send nothing)."""
        ...

    def interrupt(self, transport: Transport, reason: str) -> None:
        """End this process's `send` over a transport soon, with a `WeightSyncError`; called by another thread."""
        ...


class WeightSink(Protocol):
    """A replica, as the receiver of weights. Calls come in this order, while the replica is paused."""

    async def begin(self, manifest: Manifest) -> None:
        """Make ready; raises `WeightSyncError` naming engine parameters the manifest leaves out, or tensors unknown to
        the engine.
        """
        ...

    async def receive(self, transport: Transport, first_rank: int) -> Sequence[Digests]:
        """Take all tensors in as receivers `first_rank`, `first_rank + 1`, ...; digests as received, per engine
        rank.
        """
        ...

    async def commit(self, version: int) -> None:
        """Check that the engine computes with what it received (packed copies, tied heads), then serve this version.

        Raises `WeightSyncError` naming the stale tensor; the replica then serves nothing until a transfer succeeds.
        """
        ...


def verify_receipt(sent: Manifest, digests: Digests, received: Digests, receiver: str) -> None:
    """Raise a `WeightSyncError` that names every tensor not sent, or missing, extra or corrupt at a receiver."""
    expected = [spec.name for spec in sent.tensors]
    sent_names = set(expected)
    problems = {
        "not sent": [name for name in expected if name not in digests],
        "missing": [name for name in expected if name in digests and name not in received],
        "extra": [name for name in received if name not in sent_names],
        "corrupt": [n for n in expected if n in digests and n in received and received[n] != digests[n]],
    }
    found = {problem: names for problem, names in problems.items() if names}
    if found:
        what = "; ".join(f"{problem}: {', '.join(names)}" for problem, names in found.items())
        names = tuple(name for names in found.values() for name in names)
        raise WeightSyncError(f"weight version {sent.version} arrived broken at {receiver}: {what}", names)


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


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor on the wire."""
    count = 1
    for extent in spec.shape:
        count *= extent
    return count * ITEM_BYTES[spec.dtype]
