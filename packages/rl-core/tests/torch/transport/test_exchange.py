"""Ranks exchange parts of weights by messages between processes."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from splits import Engine, Fsdp, Megatron, Weight, cut
from transport_peers import Peer

from rl_core import resharding
from rl_core.devices import CPU
from rl_core.errors import RLError, WeightSyncError
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.torch.training.publishing import send_weights
from rl_core.torch.transport import ReceivingEnd, SendingEnd, exchange
from rl_core.torch.transport.bucket import Layout, Parts, Region, lay_out, parts_to_send
from rl_core.torch.transport.changes import ChangedLanes
from rl_core.torch.transport.channel import Channel, asking
from rl_core.torch.transport.exchange import Exchange, HeldPart, Holdings, RankShare, balanced, plan_of, planned
from rl_core.weights import ITEM_BYTES, Manifest, TensorSpec, Transport

NUM_RANKS, PER_NODE = 8, 2
BUCKET_BYTES = 4096
NUM_VERSIONS = 3
TIMEOUT_S = 280

CASES: dict[str, tuple[Fsdp | Megatron, Engine]] = {
    "fsdp to tp2": (Fsdp(shards=8), Engine(tp=2)),
    "fsdp2 tp2 ep2 pp2 to ep4": (Fsdp(pp=2, shards=2, tp=2, ep=2), Engine(tp=4, has_ep=True)),
    "megatron tp2 pp2 to tp2 pp2": (Megatron(pp=2, dp=2, tp=2), Engine(tp=2, pp=2)),
}


def model() -> dict[str, Weight]:
    weights = {"embedding": Weight((96, 40), "rows"), "scalar": Weight((), "copied")}
    for layer in range(4):
        weights[f"{layer}.q"] = Weight((64, 40), "rows", layer)
        weights[f"{layer}.o"] = Weight((40, 64), "columns", layer)
        weights[f"{layer}.norm"] = Weight((39,), "copied", layer)
        for expert in range(4):
            weights[f"{layer}.{expert}.up"] = Weight((24, 40), "rows", layer, expert)
            weights[f"{layer}.{expert}.down"] = Weight((40, 24), "columns", layer, expert)
    return weights


def dtype_of(name: str) -> str:
    return "float32" if name.endswith("norm") else "bfloat16"


def whole_model(version: int) -> dict[str, torch.Tensor]:
    """In float32, which most tensors are rounded from on their way."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in model().items()}


def kept_by(engine: Engine, rank: int) -> Parts:
    weights = model()
    read = {
        name: [Region.of(torch.empty(weight.shape, device="meta")[cut(box)]) for box in engine.boxes(weight, rank)]
        for name, weight in weights.items()
    }
    return parts_to_send(read, {name: weight.shape for name, weight in weights.items()})


def holdings_of(trainer: Fsdp | Megatron, rank: int, values: dict[str, torch.Tensor]) -> Holdings:
    return {
        name: [HeldPart(box, values[name][cut(box)].clone()) for box in trainer.boxes(weight, rank)]
        for name, weight in model().items()
    }


def layout_of(engine: Engine, rank: int, version: int) -> Layout:
    specs = tuple(TensorSpec(name, weight.shape, dtype_of(name)) for name, weight in model().items())
    return lay_out(Manifest(version, specs), BUCKET_BYTES).keeping(kept_by(engine, rank))


def fill_all(own: Exchange, layout: Layout, values: dict[str, torch.Tensor], *, is_right: bool = True) -> None:
    """Fill every bucket, with the bits that today's path fills it with, and compare the digests."""
    for bucket in layout.buckets:
        assert bucket.num_bytes <= BUCKET_BYTES or len([slot for slot in bucket.slots if slot.num_bytes]) == 1
        buffer = torch.full((bucket.num_bytes,), 0x55, dtype=torch.uint8)
        own.fill(bucket, buffer)
        expected = torch.full_like(buffer, 0x55)
        for slot in bucket.slots:
            slot.fill(expected, values[slot.spec.name].to(getattr(torch, slot.spec.dtype)))
        assert buffer.equal(expected) or not is_right, bucket
    own.compare(own.told_digests())


class Mailbox:
    """Messages between threads, each of which runs one rank."""

    def __init__(self, breaks_at: int = 0) -> None:
        self.calls = [0] * NUM_RANKS
        self._breaks_at = breaks_at
        self.barrier = threading.Barrier(NUM_RANKS, timeout=TIMEOUT_S)
        self._sent: list[Sequence[torch.Tensor]] = [()] * NUM_RANKS

    def travel(self, rank: int, arrived: torch.Tensor, message: torch.Tensor, *splits: list[int]) -> None:
        self._sent[rank] = message.split(splits[1])
        self.barrier.wait()
        for peer, place in enumerate(arrived.split(splits[0])):
            place.copy_(self._sent[peer][rank])
        # Sizes and digests are integers.
        self.calls[rank] += arrived.dtype == torch.uint8
        if self.calls[rank] == self._breaks_at and arrived.dtype == torch.uint8 and arrived.numel():
            arrived[-1] ^= 1
        self.barrier.wait()


class Threads:
    """Ranks of one process that exchange versions of the weights."""

    def __init__(self, case: str, *, sends_changes: bool = False) -> None:
        self.trainer, self.engine = CASES[case]
        self.lanes = [ChangedLanes() if sends_changes else None for _ in range(NUM_RANKS)]
        shares = []
        for rank in range(NUM_RANKS):
            holdings = holdings_of(self.trainer, rank, whole_model(1))
            share = RankShare.of(layout_of(self.engine, rank, 1), holdings)
            shares.append(share._replace(node=str(rank // PER_NODE)))
        self.plans = []
        with mock.patch.object(resharding, "MIN_CUT_BYTES", 64):
            for rank in range(NUM_RANKS):
                balanced_shares, layout, buckets = balanced(shares, layout_of(self.engine, rank, 1), BUCKET_BYTES)
                plan = plan_of(balanced_shares, layout, rank, (), wave_bytes=BUCKET_BYTES)
                self.plans.append(plan._replace(buckets=buckets))

    def exchange(self, version: int, values: dict[str, torch.Tensor], mailbox: Mailbox) -> list[Any]:
        """Of each rank: the exchange, or what it raised."""

        def run_rank(rank: int) -> Any:
            layout = layout_of(self.engine, rank, version).grouped(self.plans[rank].buckets)
            own = Exchange(
                self.plans[rank],
                layout,
                holdings_of(self.trainer, rank, values),
                torch.device("cpu"),
                travel=partial(mailbox.travel, rank),
                rank=rank,
                names=[str(peer) for peer in range(NUM_RANKS)],
                lanes=self.lanes[rank],
            )
            try:
                fill_all(own, layout, values, is_right=not mailbox._breaks_at)
            except WeightSyncError as error:
                return error
            except BaseException:
                # The others would wait for this rank.
                mailbox.barrier.abort()
                raise
            if (lanes := self.lanes[rank]) is not None:
                lanes.finish()
            return own

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(NUM_RANKS)]
        errors = [error for each in futures if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [each.result() for each in futures]


def changed(values: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.where(torch.rand(each.shape, generator=generator) < share, -each, each)
        for name, each in values.items()
    }


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)], ids=["matrix", "stack of experts"])
def test_a_part_adds_its_share_of_a_product_when_it_is_read(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).bfloat16()
    left, right = torch.randn(*shape[:-1], 2), torch.randn(*shape[:-2], 2, shape[-1])
    box = tuple((1, extent - 1) for extent in shape)
    part = HeldPart(box, weight[cut(box)]).with_product(left, right, 0.5)
    expected = (weight.float() + 0.5 * (left @ right))[cut(box)]
    torch.testing.assert_close(part.read(), expected, rtol=1e-6, atol=1e-6)
    weight.zero_()
    torch.testing.assert_close(part.read(), 0.5 * (left @ right)[cut(box)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", list(CASES))
def test_only_changed_values_travel_between_nodes(case: str) -> None:
    """A hundredth of the values; then all, and then the same again."""
    ranks, values = Threads(case, sends_changes=True), whole_model(1)
    sent = []
    for version, share in enumerate((0.0, 0.01, 1.0, 0.0), start=1):
        values = changed(values, share)
        found = ranks.exchange(version, values, Mailbox())
        assert not [each for each in found if isinstance(each, Exception)]
        sent.append(sum(each.num_bytes_sent for each in found))
        within = sum(each.num_bytes_planned for each in found) - sent[0]
        assert within == 0
    whole = Threads(case).exchange(1, values, Mailbox())
    assert sent[0] == sent[2] == sum(each.num_bytes_sent for each in whole)
    assert sent[3] < sent[1] < sent[0]


@pytest.mark.parametrize("sends_changes", [False, True])
def test_a_bit_of_any_message_that_changes_on_its_way_is_noticed_and_named(sends_changes: bool) -> None:
    """In the second version; of every message to the ranks, the sizes of changes and the digests excepted."""
    case = "megatron tp2 pp2 to tp2 pp2"
    Threads(case, sends_changes=sends_changes).exchange(1, whole_model(1), mailbox := Mailbox())
    assert mailbox.calls[0] > 3
    for breaks_at in (1, 2, 3, mailbox.calls[0] // 2, mailbox.calls[0]):
        ranks, values = Threads(case, sends_changes=sends_changes), whole_model(1)
        ranks.exchange(1, values, Mailbox())
        found = ranks.exchange(2, changed(values, 0.01), Mailbox(breaks_at))
        errors = [each for each in found if isinstance(each, WeightSyncError)]
        assert errors, breaks_at
        assert all(set(each.tensors) < set(model()) for each in errors)
        assert all("other values than that rank sent" in str(each) for each in errors)


class Messages:
    """`torch.distributed` that counts exchanges and the bytes that arrive, and may change a bit of one of them, or end
    the process instead of one.
    """

    def __init__(self, breaks_at: int, dies_at: int) -> None:
        self.calls = self.num_bytes = 0
        self._breaks_at, self._dies_at = breaks_at, dies_at

    def all_to_all_single(self, arrived: torch.Tensor, message: torch.Tensor, *splits: Any) -> None:
        self.calls += 1
        if self.calls == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_to_all_single(arrived, message, *splits)
        if arrived.dtype == torch.uint8:
            self.num_bytes += arrived.numel()
            if self.calls == self._breaks_at:
                arrived[-1] ^= 1


class Outcome(NamedTuple):
    """Of the last version on one rank: collectives and bytes that arrived, both by the plan, and all waves."""

    calls: int
    num_bytes: int
    planned_calls: int
    planned_bytes: int
    digest: str


def run(rank: int, port: int, case: str, breaks_at: int, dies_at: int) -> Outcome:
    """Exchange several versions; the last rank of a node ends at a collective of the second."""
    trainer, engine = CASES[case]
    timeout = timedelta(seconds=20 if dies_at else TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)
    assert dist.group.WORLD is not None
    plan = None
    for version in range(1, NUM_VERSIONS + 1):
        layout, values = layout_of(engine, rank, version), whole_model(version)
        holdings = holdings_of(trainer, rank, values)
        dies = version == 2 and rank == PER_NODE - 1
        messages = Messages(breaks_at if rank == 0 else 0, dies_at if dies else 0)
        if dies and dies_at < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with (
            mock.patch.object(exchange, "node_name", return_value=str(rank // PER_NODE)),
            mock.patch.object(
                exchange, "dist", SimpleNamespace(**{**vars(dist), "all_to_all_single": messages.all_to_all_single})
            ),
            mock.patch.object(resharding, "MIN_CUT_BYTES", 64),
        ):
            before, plan = plan, planned(plan, layout, holdings, dist.group.WORLD, BUCKET_BYTES)
            assert before is None or before is plan, "the plan is made once"
            layout = layout.grouped(plan.buckets)
            own = Exchange.among_senders(plan, layout, holdings, torch.device("cpu"))
            fill_all(own, layout, values, is_right=not breaks_at)
    dist.destroy_process_group()
    assert plan is not None
    slots = [slot.spec for bucket in layout.buckets for slot in bucket.slots]
    received = [
        -(-prod(piece.shape) * ITEM_BYTES[slots[tensor].dtype] // 8) * 8
        for wave in plan.waves
        for tensor, number in wave.tensors
        for way in wave.ways
        for piece in plan.pieces.get((plan.kind_of[tensor], number, way), ([], []))[1]
    ]
    digest = hashlib.sha256(repr((plan.waves, plan.kind_of)).encode()).hexdigest()
    of_digests = 1
    planned_calls = sum(len(wave.ways) for wave in plan.waves) + of_digests
    return Outcome(messages.calls, messages.num_bytes, planned_calls, sum(received), digest)


def run_all(case: str, breaks_at: int = 0, dies_at: int = 0) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    peers = [Peer(run, rank, port, case, breaks_at, dies_at) for rank in range(NUM_RANKS)]
    try:
        return [outcome_of(peer) for peer in peers]
    finally:
        for peer in peers:
            peer.end()


def outcome_of(peer: Peer) -> Any:
    try:
        return peer.result()[0]
    except EOFError as error:  # It was killed.
        return error


@pytest.mark.parametrize("case", partly_exhaustive(list(CASES), always=["fsdp2 tp2 ep2 pp2 to ep4"]))
def test_each_rank_gets_what_its_receiver_keeps_bit_for_bit(case: str) -> None:
    """In as many messages and bytes as planned."""
    found = run_all(case)
    assert not [each for each in found if isinstance(each, Exception)]
    assert len({(each.calls, each.digest) for each in found}) == 1
    assert all(each[:2] == each[2:4] for each in found)


@pytest.mark.parametrize("breaks_at", partly_exhaustive([1, 2, 3, 4], always=[4]))
def test_a_bit_that_changes_on_its_way_is_noticed_and_named(breaks_at: int) -> None:
    first = run_all("fsdp to tp2", breaks_at)[0]
    assert isinstance(first, WeightSyncError)
    assert "rank 0 received from rank" in str(first)
    assert set(first.tensors) < set(model())


@pytest.mark.parametrize("dies_at", partly_exhaustive([-1, 1, 2, 3, 10**6], always=[]))
def test_all_ranks_end_with_one_that_is_killed(dies_at: int) -> None:
    """Before the plan, on each way of a piece, and before the digests."""
    case = "megatron tp2 pp2 to tp2 pp2"
    if dies_at > 3:
        dies_at = run_all(case)[0].calls
    found = run_all(case, dies_at=dies_at)
    assert len(found) == NUM_RANKS
    assert all(isinstance(each, Exception) for each in found)


def test_a_long_wait_ends_once_another_rank_has_failed_and_a_short_one_does_not_ask() -> None:
    ours, theirs = socket.socketpair()
    asked = []

    def reason() -> str:
        asked.append(None)
        return "rank 3 failed: KeyError" if len(asked) > 1 else ""

    with ours, theirs, asking(reason):
        Channel(theirs, "the sender", TIMEOUT_S).send({"taken": 0}, "bucket 1")
        channel = Channel(ours, "receiver rank 1", TIMEOUT_S)
        assert channel.receive("bucket 1") == {"taken": 0}
        assert not asked
        with pytest.raises(WeightSyncError, match=r"during bucket 2.* rank 3 failed: KeyError"):
            channel.receive("bucket 2")
    assert len(asked) == 2


def publish(rank: int, port: int, address: str, fails_in: int) -> tuple[list[str], float]:
    """Send three versions to a receiver in a thread, that of rank 1 fails in one of them, in which that of rank 0 waits
    for it; what the sender raised, and the seconds from the failure to the end of the transfer."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trainer, keeps = Fsdp(shards=2), kept_by(Engine(tp=2), rank)
    specs = tuple(TensorSpec(name, weight.shape, dtype_of(name)) for name, weight in model().items())
    mesh: Any = SimpleNamespace(rank=rank, control=dist.group.WORLD, device=torch.device("cpu"), world_size=2)
    transport = Transport("ipc", address, 1, BUCKET_BYTES, TIMEOUT_S, every_rank_sends=True, secret=b"s" * 16)
    ends, found, over = (SendingEnd(CPU), ReceivingEnd(CPU)), [], threading.Event()
    failed_at = time.monotonic()

    def receive(manifest: Manifest, values: dict[str, torch.Tensor]) -> None:
        with suppress(WeightSyncError, KeyError), ends[1].transfer(manifest, transport, 1, keeps) as receiver:
            for name, tensor in receiver:
                if manifest.version == fails_in:
                    if rank == 1:
                        raise KeyError("no such parameter")
                    over.wait(TIMEOUT_S)
                expected = values[name].to(tensor.dtype)
                for region in keeps.get(name, [Region.of(expected)]):
                    assert region.read(tensor).equal(region.read(expected))
            found.append(f"received {manifest.version}")

    with mock.patch.object(type(CPU), "memory_id", str(rank)):
        for version in range(1, NUM_VERSIONS + 1):
            values = whole_model(version)
            weights: Any = SimpleNamespace(holdings=lambda _, values=values: holdings_of(trainer, rank, values))
            manifest = Manifest(version, specs, is_held_in_parts=True)
            thread = threading.Thread(target=receive, args=(manifest, values))
            thread.start()
            failed_at = time.monotonic()
            try:
                send_weights(ends[0], weights, manifest, transport, "bfloat16", mesh)
            except RLError as error:
                found.append(f"{type(error).__name__}: {error}")
            took = time.monotonic() - failed_at
            if version == fails_in:
                over.set()
                thread.join()
                break
            thread.join()
    dist.destroy_process_group()
    return found, took


@pytest.mark.parametrize("fails_in", [0, 2])
def test_a_receiver_that_fails_ends_the_transfer_of_all_ranks_soon(fails_in: int) -> None:
    """Also of a rank whose receiver waits for the failed one; versions before it, or all, arrive."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    peers = [Peer(publish, rank, port, f"127.0.0.1:{port}", fails_in) for rank in range(2)]
    try:
        outcomes = [peer.result()[0] for peer in peers]
    finally:
        for peer in peers:
            peer.end()
    assert not [each for each in outcomes if isinstance(each, Exception)]
    for found, took in outcomes:
        received = [f"received {version}" for version in range(1, (fails_in or NUM_VERSIONS + 1))]
        assert found[: len(received)] == received
        assert len(found) == len(received) + bool(fails_in), found
        if fails_in:
            assert "no such parameter" in found[-1]
            assert took < TIMEOUT_S / 4
