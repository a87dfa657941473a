"""A model's weights on their way from its ranks to the generators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

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

        def holdings() -> Holdings:
            found = weights.holdings(dtype)
            assert found is not None, "the manifest has it that ranks hold all tensors in parts"
            return found

        link = end.exchange(manifest, transport, mesh.rank, mesh.world_size, holdings)
        _log.info("weight version %d: this rank sent %.1f MB", manifest.version, link.num_bytes_sent / 1e6)
        return link.sent_digests
    sends = transport.every_rank_sends or mesh.rank == 0
    if not sends:
        end.close()  # The ranks that send give up a connection of all ranks, if there is one.
    digests: Sequence[str] = ()
    failure: BaseException | None = None
    gathered: list[tuple[str, Tensor | None]] = []
    with ExitStack() as stack:
        senders: list[Sender] = []

        def meet() -> None:
            if sends:
                senders.append(stack.enter_context(end.transfer(manifest, transport)))

        def put() -> None:
            nonlocal failure
            try:
                for sender in senders if failure is None else ():
                    for name, tensor in gathered:
                        assert tensor is not None, f"{name} did not reach a rank that sends it"
                        sender.put(name, tensor)
            except BaseException as error:  # noqa: BLE001 - raised by `agree`
                # This rank still takes part in bringing tensors together, for which the others would wait.
                failure = error
            gathered.clear()

        def agree() -> None:
            if failure is not None:
                raise failure

        def finish() -> None:
            nonlocal digests
            agree()
            for sender in senders:
                digests = sender.finish()
                if transport.sends_changes and transport.kind != "ipc":
                    share = sender.num_bytes_sent / (manifest.num_bytes or 1)
                    _log.info("weight version %d: sent %.2f %% of its bytes", manifest.version, 100 * share)

        on_all_ranks(mesh.control, meet)
        if exchanges_parts(manifest, transport):
            _exchange(end, senders[0], weights, transport, dtype, mesh)
            on_all_ranks(mesh.control, finish)
            end.lanes.finish()
            return digests
        # Parts of about a bucket, as many on every rank, travel at one time. Ranks that do not send keep no tensors.
        sizes = {spec.name: num_bytes(spec) for spec in manifest.tensors}
        size, num_parts, agreed_at = 0, 0, 1
        for tensors in _stream(weights, manifest, transport, dtype):
            size += sum(sizes.get(name, 0) for name, _ in tensors)
            gathered += tensors if sends else []
            if size >= transport.bucket_bytes:
                put()
                size, num_parts = 0, num_parts + 1
                # An agreement costs a message between all ranks, and a failure must not wait for the last part: after
                # 1, 2, 4, 8 ... parts, at most as many are brought together in vain as before the failure.
                if num_parts == agreed_at:
                    on_all_ranks(mesh.control, agree)
                    agreed_at *= 2
        put()
        on_all_ranks(mesh.control, finish)
    return digests


def _exchange(
    end: SendingEnd, sender: Sender, weights: RankWeights, transport: Transport, dtype: str, mesh: RankMesh
) -> None:
    """Bring together on every rank only the parts that its receiver keeps, and send them; collective.

    A rank whose receiver has failed still takes part, for the others would wait for its pieces. It leaves word in the
    store of all ranks, so that no other waits longer for a receiver that works together with the failed one.
    """
    holdings = weights.holdings(dtype)
    assert holdings is not None, "the manifest has it that ranks hold all tensors in parts"
    layouts: list[Layout] = []
    failure: BaseException | None = None
    on_all_ranks(mesh.control, lambda: layouts.append(sender.begin()))
    end.plan = planned(end.plan, layouts[0], holdings, mesh.control, transport.bucket_bytes)
    layout = sender.regroup(end.plan.buckets)
    lanes = end.lanes if transport.sends_changes else None
    exchange = Exchange.among_senders(end.plan, layout, holdings, mesh.device, lanes)
    store, key = dist.distributed_c10d._get_default_store(), f"failed {transport.address} {layouts[0].manifest}"

    def attempt(action: Callable[[], Tensor | None]) -> Tensor | None:
        nonlocal failure
        if failure is None:
            try:
                return action()
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                failure = error
                store.set(key, f"rank {mesh.rank} failed: {type(error).__name__}: {error}")
        return None

    with asking(lambda: store.get(key).decode() if store.check([key]) else ""):
        for bucket in layout.buckets:
            buffer = attempt(partial(sender.buffer, bucket))
            if buffer is None:
                buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=mesh.device)
            exchange.fill(bucket, buffer)
            attempt(partial(sender.send, bucket))
        told = exchange.told_digests()
        attempt(partial(exchange.compare, told))
    if lanes is not None:
        share = 100 * exchange.num_bytes_sent / (exchange.num_bytes_planned or 1)
        _log.info("rank %d sent %.2f %% of the bytes of its messages to other ranks", mesh.rank, share)

    def agree() -> None:
        if failure is not None:
            raise failure

    # No receiver is told that all has arrived before every rank has what the others sent.
    on_all_ranks(mesh.control, agree)
