"""A model's weights on their way from its ranks to the generators."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from rl_core.torch.process_group import on_all_ranks
from rl_core.torch.training.backend import RankMesh, RankWeights
from rl_core.torch.transport import Sender, SendingEnd
from rl_core.torch.transport.bucket import Layout, exchanges_parts
from rl_core.torch.transport.exchange import Exchange, planned
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
    sends = transport.every_rank_sends or mesh.rank == 0
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
                if transport.sends_changes:
                    share = sender.num_bytes_sent / (manifest.num_bytes or 1)
                    _log.info("weight version %d: sent %.2f %% of its bytes", manifest.version, 100 * share)

        on_all_ranks(mesh.control, meet)
        if exchanges_parts(manifest, transport):
            _exchange(end, senders[0], weights, transport, dtype, mesh)
            on_all_ranks(mesh.control, finish)
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

    A rank whose receiver has failed still takes part, for the others would wait for its pieces.
    """
    holdings = weights.holdings(dtype)
    assert holdings is not None, "the manifest has it that ranks hold all tensors in parts"
    layouts: list[Layout] = []
    failure: BaseException | None = None

    def agree() -> None:
        if failure is not None:
            raise failure

    on_all_ranks(mesh.control, lambda: layouts.append(sender.begin()))
    (layout,) = layouts
    end.plan = planned(end.plan, layout, holdings, mesh.control, transport.bucket_bytes)
    exchange = Exchange.among_senders(end.plan, layout, holdings, mesh.device)
    agreed_at = 1
    for number, bucket in enumerate(layout.buckets, start=1):
        try:
            agree()
            buffer = sender.buffer(bucket)
        except BaseException as error:  # noqa: BLE001 - raised by `agree`
            failure = error
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=mesh.device)
        exchange.fill(bucket, buffer)
        try:
            agree()
            sender.send(bucket)
        except BaseException as error:  # noqa: BLE001 - raised by `agree`
            failure = error
        if number == agreed_at:
            on_all_ranks(mesh.control, agree)
            agreed_at *= 2
    on_all_ranks(mesh.control, agree)
    on_all_ranks(mesh.control, exchange.check)
