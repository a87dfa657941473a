"""A model's weights on their way from its ranks to the generators."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from rl_core.torch.collective_errors import on_all_ranks
from rl_core.torch.training.backend import RankMesh, RankWeights
from rl_core.torch.transport import Sender, SendingEnd
from rl_core.weights import Manifest, Transport, WeightForm, num_bytes

_log = logging.getLogger(__name__)


def manifest_of(weights: RankWeights, version: int, dtype: str, form: WeightForm = "merged") -> Manifest:
    """Every tensor of a form by name in the compute dtype; a tied head is named, not sent. Collective.

    Raises:
        ValueError: If there are no adapters whose factors could be sent.
    """
    if form == "merged":
        return Manifest(version, tuple(weights.specs(dtype)), weights.tied)
    factors = tuple(weights.adapter_specs(dtype))
    if not factors:
        raise ValueError("cannot send adapters: the model has none")
    if form == "adapter":
        return Manifest(version, factors, num_factors=len(factors))
    return Manifest(version, (*weights.specs(dtype), *factors), weights.tied, len(factors))


def stream_of(
    weights: RankWeights, manifest: Manifest, transport: Transport, dtype: str
) -> Iterator[Sequence[tuple[str, Tensor | None]]]:
    """Tensors in the order of a manifest that `manifest_of` made, for `send_weights`; collective."""
    everywhere = transport.every_rank_sends
    if manifest.form != "adapter":
        yield from weights.stream(
            dtype,
            everywhere=everywhere,
            bucket_bytes=transport.bucket_bytes,
            merges_adapters=manifest.form == "merged",
            served=True,
        )
    if manifest.num_factors:
        for named in weights.adapters(dtype, everywhere=everywhere):
            yield [named]


def send_weights(
    end: SendingEnd,
    stream: Iterable[Sequence[tuple[str, Tensor | None]]],
    manifest: Manifest,
    transport: Transport,
    mesh: RankMesh,
) -> Sequence[str]:
    """Send from rank 0, or from every rank if each has receivers of its own; collective.

    Returns the digest of all that each group of receivers got on ranks that send, nothing elsewhere.

    Args:
        end: This rank's, used again by the next transfer.
        stream: Whole tensors in the manifest's order, parameter by parameter; as many items on every rank, with None
            allowed on ranks that do not send. Advancing it may be collective.
        manifest: Tensors of the weight version that is sent.
        transport: Transfer settings, the same on senders and receivers.
        mesh: Mesh of the model's ranks.

    Raises:
        WeightSyncError: If this rank's receivers do not come, or time runs out.
        PeerFailed: If another rank's failed.
    """
    sends = transport.every_rank_sends or mesh.rank == 0
    digests: Sequence[str] = ()
    with ExitStack() as stack:
        senders: list[Sender] = []

        def meet() -> None:
            if sends:
                senders.append(stack.enter_context(end.transfer(manifest, transport)))

        def finish() -> None:
            nonlocal digests
            for sender in senders:
                digests = sender.finish()
                if transport.sends_changes:
                    share = sender.num_bytes_sent / (manifest.num_bytes or 1)
                    _log.info("weight version %d: sent %.2f %% of its bytes", manifest.version, 100 * share)

        on_all_ranks(mesh.control, meet)
        for part in _parts(stream, manifest, transport.bucket_bytes, keeps=sends):
            on_all_ranks(mesh.control, partial(_put, senders, part))
        on_all_ranks(mesh.control, finish)
    return digests


def _parts(
    stream: Iterable[Sequence[tuple[str, Tensor | None]]], manifest: Manifest, bucket_bytes: int, *, keeps: bool
) -> Iterator[list[tuple[str, Tensor | None]]]:
    """Consecutive tensors of about a bucket each, as many parts on every rank; without tensors on ranks that do not
    keep them.
    """
    sizes = {spec.name: num_bytes(spec) for spec in manifest.tensors}
    gathered: list[tuple[str, Tensor | None]] = []
    size = 0
    for tensors in stream:
        size += sum(sizes.get(name, 0) for name, _ in tensors)
        gathered += tensors if keeps else []
        if size >= bucket_bytes:
            yield gathered
            gathered, size = [], 0
    yield gathered


def _put(senders: Sequence[Sender], tensors: Sequence[tuple[str, Tensor | None]]) -> None:
    for sender in senders:
        for name, tensor in tensors:
            assert tensor is not None, f"{name} did not reach a rank that sends it"
            sender.put(name, tensor)
