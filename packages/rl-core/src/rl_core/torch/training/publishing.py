"""A model's weights on their way from its ranks to the generators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.process_group import on_all_ranks
from rl_core.torch.training.backend import RankMesh, RankWeights
from rl_core.torch.transport import Sender, SendingEnd
from rl_core.torch.transport.bucket import Layout, exchanges_parts
from rl_core.torch.transport.channel import asking
from rl_core.torch.transport.exchange import Exchange, Holdings, planned
from rl_core.weights import Manifest, Transport, WeightForm, num_bytes

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


def manifest_of(weights: RankWeights, version: int, dtype: str, form: WeightForm = "merged") -> Manifest:
    """Return every tensor of a form by name in the compute dtype; a tied head is named, not sent. Collective.

    Raises:
        ValueError: If there are no adapters whose factors could be sent.
    """
    if form == "merged":
        # Where every rank has whole tensors there is nothing to exchange.
        is_held_in_parts = len(weights.holders) > 1 and weights.holdings(dtype) is not None
        return Manifest(version, tuple(weights.specs(dtype)), weights.tied, is_held_in_parts=is_held_in_parts)
    factors = tuple(weights.adapter_specs(dtype))
    if not factors:
        raise ValueError("cannot send adapters: the model has none")
    if form == "adapter":
        return Manifest(version, factors, num_factors=len(factors))
    return Manifest(version, (*weights.specs(dtype), *factors), weights.tied, len(factors))


def _stream(
    weights: RankWeights, manifest: Manifest, transport: Transport, dtype: str
) -> Iterator[Sequence[tuple[str, Tensor | None]]]:
    """Yield tensors in the order of a manifest, parameter by parameter; collective.

    There are as many items on every rank, with None allowed on ranks that do not send.
    """
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
    end: SendingEnd, weights: RankWeights, manifest: Manifest, transport: Transport, dtype: str, mesh: RankMesh
) -> Sequence[str]:
    """Send from rank 0, or from every rank if each has its own receivers; collective.

    Returns:
        On ranks that send, the digest of everything that each group of receivers got; nothing elsewhere.

    Args:
        end: This rank's, used again by the next transfer.
        weights: Weights of the model.
        manifest: Tensors of the weight version that is sent, as `manifest_of` lists them.
        transport: Transfer settings, the same on senders and receivers.
        dtype: Compute dtype of the model.
        mesh: Mesh of the model's ranks.

    Raises:
        WeightSyncError: If this rank's receivers do not come, or time runs out.
        PeerFailed: If another rank's failed.
    """
    if exchanges_parts(manifest, transport) and transport.kind == "collective":
        link = end.exchange(manifest, transport, mesh.rank, mesh.world_size, lambda: _holdings(weights, dtype))
        _log.info("weight version %d: this rank sent %.1f MB", manifest.version, link.num_bytes_sent / 1e6)
        return link.sent_digests
    sends = transport.every_rank_sends or mesh.rank == 0
    if not sends:
        end.close()  # The ranks that send give up a connection of all ranks, if there is one.
    own = _OwnPart()
    digests: list[str] = []
    with ExitStack() as stack:
        senders: list[Sender] = []

        def meet() -> None:
            if sends:
                senders.append(stack.enter_context(end.transfer(manifest, transport)))

        def finish() -> None:
            own.check()
            for sender in senders:
                digests.extend(sender.finish())
                if transport.sends_changes and transport.kind != "ipc":
                    share = sender.num_bytes_sent / (manifest.num_bytes or 1)
                    _log.info("weight version %d: sent %.2f %% of its bytes", manifest.version, 100 * share)

        on_all_ranks(mesh.control, meet)
        if exchanges_parts(manifest, transport):
            _exchange(own, end, senders[0], weights, transport, dtype, mesh)
            on_all_ranks(mesh.control, finish)
            end.lanes.finish()
        else:
            _put_whole(own, senders, weights, manifest, transport, dtype, mesh)
            on_all_ranks(mesh.control, finish)
    return digests


class _OwnPart:
    """This rank's own part of a transfer, such as the hop to its receivers.

    If it fails, the rank continues with the work of all ranks, because the others would wait for it. They learn of the
    failure when all agree, in `check`.
    """

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    def attempt(
        self, action: Callable[[], Result], report: Callable[[BaseException], object] | None = None
    ) -> Result | None:
        """Return the result of an action; None if it fails now, which is reported, or another one has failed."""
        if self._failure is None:
            try:
                return action()
            except BaseException as error:  # noqa: BLE001 - raised by `check`
                self._failure = error
                if report is not None:
                    report(error)
        return None

    def check(self) -> None:
        """Raise the failure, if there was one."""
        if self._failure is not None:
            raise self._failure


def _put_whole(
    own: _OwnPart,
    senders: Sequence[Sender],
    weights: RankWeights,
    manifest: Manifest,
    transport: Transport,
    dtype: str,
    mesh: RankMesh,
) -> None:
    """Bring whole tensors together and send them; collective.

    About a bucket of them, as many on every rank, travels at one time. Ranks that do not send keep none.
    """
    gathered: list[tuple[str, Tensor | None]] = []

    def put() -> None:
        for sender in senders:
            for name, tensor in gathered:
                assert tensor is not None, f"{name} did not reach a rank that sends it"
                sender.put(name, tensor)

    sizes = {spec.name: num_bytes(spec) for spec in manifest.tensors}
    size, num_parts, agreed_at = 0, 0, 1
    for tensors in _stream(weights, manifest, transport, dtype):
        size += sum(sizes.get(name, 0) for name, _ in tensors)
        gathered += tensors if senders else []
        if size >= transport.bucket_bytes:
            own.attempt(put)
            gathered.clear()
            size, num_parts = 0, num_parts + 1
            # An agreement costs a message between all ranks, and a failure must not wait for the last part: after
            # 1, 2, 4, 8 ... parts, at most as many are brought together in vain as before the failure.
            if num_parts == agreed_at:
                on_all_ranks(mesh.control, own.check)
                agreed_at *= 2
    own.attempt(put)


def _holdings(weights: RankWeights, dtype: str) -> Holdings:
    found = weights.holdings(dtype)
    assert found is not None, "the manifest has it that ranks hold all tensors in parts"
    return found


def _exchange(
    own: _OwnPart,
    end: SendingEnd,
    sender: Sender,
    weights: RankWeights,
    transport: Transport,
    dtype: str,
    mesh: RankMesh,
) -> None:
    """Bring together on every rank only the parts that its receiver keeps, and send them; collective.

    A rank whose receiver has failed leaves word in the store of all ranks, so that no other waits longer for a receiver
    that works together with the failed one.
    """
    holdings = _holdings(weights, dtype)
    layouts: list[Layout] = []
    on_all_ranks(mesh.control, lambda: layouts.append(sender.begin()))
    end.plan = planned(end.plan, layouts[0], holdings, mesh.control, transport.bucket_bytes)
    layout = sender.regroup(end.plan.buckets)
    lanes = end.lanes if transport.sends_changes else None
    exchange = Exchange.among_senders(end.plan, layout, holdings, mesh.device, lanes)
    store, key = dist.distributed_c10d._get_default_store(), f"failed {transport.address} {layouts[0].manifest}"

    def report(error: BaseException) -> None:
        store.set(key, f"rank {mesh.rank} failed: {type(error).__name__}: {error}")

    with asking(lambda: store.get(key).decode() if store.check([key]) else ""):
        for bucket in layout.buckets:
            buffer = own.attempt(partial(sender.buffer, bucket), report)
            if buffer is None:
                buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=mesh.device)
            exchange.fill(bucket, buffer)
            own.attempt(partial(sender.send, bucket), report)
        told = exchange.told_digests()
        own.attempt(partial(exchange.compare, told), report)
    if lanes is not None:
        share = 100 * exchange.num_bytes_sent / (exchange.num_bytes_planned or 1)
        _log.info("rank %d sent %.2f %% of the bytes of its messages to other ranks", mesh.rank, share)
    # No receiver is told that all has arrived before every rank has what the others sent.
    on_all_ranks(mesh.control, own.check)
