"""Ranks of a policy and of engines on other devices exchange parts of weights."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from splits import Engine, Fsdp, Megatron, Weight, cut
from transport_peers import Peer

from rl_core.devices import CPU
from rl_core.errors import WeightSyncError
from rl_core.resharding import IN_PLACE
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.torch.transport import ReceivingEnd, SendingEnd, apart, exchange, interrupt
from rl_core.torch.transport.apart import ApartLink
from rl_core.torch.transport.bucket import Parts, Region, parts_to_send
from rl_core.torch.transport.exchange import HeldPart, Holdings
from rl_core.weights import ITEM_BYTES, Manifest, TensorSpec, Transport

BUCKET_BYTES = 8192
SOON_S = 120.0
VERSIONS = (1, 2, 3)

Source = Fsdp | Megatron

CASES: dict[str, tuple[Source, Engine, int]] = {
    "fsdp to tp2, two replicas": (Fsdp(shards=4), Engine(tp=2), 2),
    "fsdp2 tp2 to pp2": (Fsdp(shards=2, tp=2), Engine(tp=1, pp=2), 2),
    "fsdp4 ep2 to ep2": (Fsdp(shards=4, ep=2), Engine(tp=2, has_ep=True), 2),
    "pp2 fsdp2 to ep2": (Fsdp(pp=2, shards=2), Engine(tp=2, has_ep=True), 2),
    "megatron tp2 pp2 to tp2 pp2": (Megatron(pp=2, tp=2), Engine(tp=2, pp=2), 1),
    "fsdp2 to tp2": (Fsdp(shards=2), Engine(tp=2), 1),
}
PLACE = threading.local()


def model(num_layers: int = 4) -> dict[str, Weight]:
    weights = {"embedding": Weight((96, 40), "rows"), "scalar": Weight((), "copied")}
    for layer in range(num_layers):
        weights[f"{layer}.q"] = Weight((64, 40), "rows", layer)
        weights[f"{layer}.o"] = Weight((40, 64), "columns", layer)
        weights[f"{layer}.norm"] = Weight((39,), "copied", layer)
        for expert in range(4):
            weights[f"{layer}.{expert}.up"] = Weight((24, 40), "rows", layer, expert)
            weights[f"{layer}.{expert}.down"] = Weight((40, 24), "columns", layer, expert)
    return weights


def manifest_of(weights: Mapping[str, Weight], version: int) -> Manifest:
    dtypes = {name: "float32" if name.endswith("norm") else "bfloat16" for name in weights}
    specs = tuple(TensorSpec(name, weight.shape, dtypes[name]) for name, weight in weights.items())
    return Manifest(version, specs, is_held_in_parts=True)


def values_of(weights: Mapping[str, Weight], version: int) -> dict[str, torch.Tensor]:
    """In float32, which most tensors are rounded from on their way."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


def holdings_of(weights: Mapping[str, Weight], source: Source, rank: int, version: int) -> Holdings:
    values = values_of(weights, version)
    return {
        name: [HeldPart(box, values[name][cut(box)].clone()) for box in source.boxes(weight, rank)]
        for name, weight in weights.items()
    }


def kept_by(weights: Mapping[str, Weight], engine: Engine, rank: int) -> Parts:
    read = {
        name: [Region.of(torch.empty(weight.shape, device="meta")[cut(box)]) for box in engine.boxes(weight, rank)]
        for name, weight in weights.items()
    }
    return parts_to_send(read, {name: weight.shape for name, weight in weights.items()})


@contextmanager
def on_nodes() -> Iterator[None]:
    """Put two ranks of the policy on each node, and two receivers on each of others."""

    def node() -> str:
        side, rank = PLACE.rank
        return f"{side} {(rank - (side == 'receiver')) // 2}"

    with mock.patch.object(exchange, "node_name", node):
        yield


def transport(num_receivers: int, *, parts: bool = True, timeout_s: float = 60.0) -> Transport:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return Transport("collective", address, num_receivers, BUCKET_BYTES, timeout_s, every_rank_sends=parts)


@dataclass
class Sides:
    """All ranks of a case, each a thread with an end that it keeps."""

    case: str
    num_layers: int = 4

    def __post_init__(self) -> None:
        self.source, self.engine, self.num_replicas = CASES[self.case]
        self.weights = model(self.num_layers)
        self.num_ranks = self.engine.tp * self.engine.pp
        self.num_receivers = self.num_replicas * self.num_ranks
        self.senders = [SendingEnd(CPU) for _ in range(self.source.world)]
        self.receivers = [ReceivingEnd(CPU) for _ in range(self.num_receivers)]

    def kept(self, rank: int) -> Parts:
        return kept_by(self.weights, self.engine, (rank - 1) % self.num_ranks)

    def send(self, way: Transport, version: int, rank: int) -> Sequence[str]:
        PLACE.rank = "sender", rank
        manifest = manifest_of(self.weights, version)
        holdings = partial(holdings_of, self.weights, self.source, rank, version)
        link = self.senders[rank].exchange(manifest, way, rank, self.source.world, holdings)
        return link.sent_digests

    def receive(self, way: Transport, version: int, rank: int) -> tuple[dict[str, torch.Tensor], str]:
        PLACE.rank = "receiver", rank
        end, manifest = self.receivers[rank - 1], manifest_of(self.weights, version)
        with end.transfer(manifest, way, rank, self.kept(rank)) as receiver:
            arrived = {name: tensor.clone() for name, tensor in receiver}
        return arrived, receiver.digest

    def transfer(self, way: Transport, version: int) -> tuple[list[Any], list[Any]]:
        """Answers of the senders and of the receivers, or their errors."""
        with ThreadPoolExecutor(len(self.senders) + self.num_receivers) as pool:
            sending = [pool.submit(self.send, way, version, rank) for rank in range(len(self.senders))]
            taking = [pool.submit(self.receive, way, version, rank) for rank in range(1, self.num_receivers + 1)]
            answers = [[each.exception() or each.result() for each in side] for side in (sending, taking)]
        return answers[0], answers[1]

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()


def in_full(weights: Mapping[str, Weight], version: int, keeps: Sequence[Parts]) -> list[tuple[dict[str, Any], str]]:
    """What receivers get over the path that broadcasts from one rank."""
    way = transport(len(keeps), parts=False)
    manifest = manifest_of(weights, version)

    def receive(rank: int) -> tuple[dict[str, torch.Tensor], str]:
        end = ReceivingEnd(CPU)
        with end.transfer(manifest, way, rank, keeps[rank - 1]) as receiver:
            arrived = {name: tensor.clone() for name, tensor in receiver}
        end.close()
        return arrived, receiver.digest

    with ThreadPoolExecutor(len(keeps)) as pool:
        taking = [pool.submit(receive, rank) for rank in range(1, len(keeps) + 1)]
        end, values = SendingEnd(CPU), values_of(weights, version)
        with end.transfer(manifest, way) as sender:
            for spec in manifest.tensors:
                sender.put(spec.name, values[spec.name].to(getattr(torch, spec.dtype)))
            sender.finish()
        end.close()
        return [each.result() for each in taking]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit; the rest of a tensor that is kept in parts is not a number."""
    return found.dtype == wanted.dtype and found.view(-1).view(torch.uint8).equal(wanted.view(-1).view(torch.uint8))


@pytest.mark.parametrize("case", partly_exhaustive(list(CASES), always=["fsdp to tp2, two replicas"]))
def test_engine_ranks_get_the_bits_of_the_broadcast(case: str) -> None:
    sides = Sides(case)
    way = transport(sides.num_receivers)
    for version in VERSIONS:
        sent, received = sides.transfer(way, version)
        wanted = in_full(sides.weights, version, [sides.kept(rank) for rank in range(1, sides.num_receivers + 1)])
        assert sent == [[digest for _, digest in received], *[[]] * (len(sides.senders) - 1)]
        assert len(set(sent[0])) == sides.num_receivers
        for (found, _), (expected, _) in zip(received, wanted, strict=True):
            assert [name for name in expected if not same(found[name], expected[name])] == []
    sides.close()


def counted(sides: Sides, way: Transport) -> tuple[list[int], list[int], dict[int, int]]:
    """Transfer; the messages of each rank of the group, the bytes that it sent, and the bytes that the plan has."""
    calls, num_bytes, plans = Counter[int](), Counter[int](), []
    travel, made = ApartLink._travel, exchange.plan_exchange

    def count(link: ApartLink, arrived: torch.Tensor, message: torch.Tensor, *splits: Any) -> None:
        calls[link._place] += 1
        num_bytes[link._place] += message.numel()
        travel(link, arrived, message, *splits)

    def keep(*arguments: Any, **settings: Any) -> Any:
        plans.append(made(*arguments, **settings))
        return plans[-1]

    with mock.patch.object(ApartLink, "_travel", count), mock.patch.object(exchange, "plan_exchange", keep):
        sent, _ = sides.transfer(way, 1)
    assert not [each for each in sent if isinstance(each, Exception)]
    plan, planned = plans[0], Counter[int]()
    assert len({each.fingerprint for each in plans}) == 1
    for tensor, kind in zip(plan.tensors, plan.kind_of, strict=True):
        pieces = plan.kinds[kind]
        sizes = -(-pieces.num_values * tensor.item_bytes // 8) * 8
        for source, size, is_sent in zip(pieces.source, sizes, pieces.way != IN_PLACE, strict=True):
            planned[int(source)] += int(size) * bool(is_sent)
    order = range(len(sides.senders) + sides.num_receivers)
    return [calls[place] for place in order], [num_bytes[place] for place in order], planned


def test_each_rank_sends_the_bytes_of_the_plan_and_receivers_pass_parts_on() -> None:
    sides = Sides("fsdp to tp2, two replicas")
    with on_nodes():
        calls, num_bytes, planned = counted(sides, transport(sides.num_receivers))
    sides.close()
    assert len(set(calls)) == 1
    assert num_bytes == [planned[place] for place in range(len(num_bytes))]
    manifest = manifest_of(sides.weights, 1)
    kept = [sides.kept(rank) for rank in range(1, sides.num_receivers + 1)]
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    whole = {name: [Region.of(torch.empty(shape, device="meta"))] for name, shape in shapes.items()}
    items = {spec.name: ITEM_BYTES[spec.dtype] for spec in manifest.tensors}

    def bytes_of(parts: Parts) -> int:
        return sum(items[n] * each.num_values for n, regions in (whole | dict(parts)).items() for each in regions)

    senders = [0, *range(sides.num_receivers + 1, len(num_bytes))]
    from_policy = sum(num_bytes[place] for place in senders)
    # Both receivers of a node keep every vector and half of each matrix, so that the node is sent the model once.
    assert manifest.num_bytes * 2 <= from_policy <= 1.05 * manifest.num_bytes * 2
    assert sum(map(bytes_of, kept)) <= sum(num_bytes) <= 1.05 * sum(map(bytes_of, kept))
    assert all(num_bytes[place] for place in range(1, sides.num_receivers + 1))


def test_the_number_of_messages_follows_from_the_bytes() -> None:
    found = []
    for count in (2, 32):
        sides = Sides("fsdp to tp2, two replicas")
        sides.weights = {f"{number}": Weight((64 // count * 16, 40), "rows") for number in range(count)}
        with mock.patch.object(sys.modules[__name__], "BUCKET_BYTES", 2**17):
            found.append(counted(sides, transport(sides.num_receivers))[0])
        sides.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("lane", ["policy to engine", "engine to engine"])
@pytest.mark.parametrize("number", partly_exhaustive([1, 3], always=[1]))
def test_a_bit_that_changes_on_its_way_is_noticed_and_named(lane: str, number: int) -> None:
    sides = Sides("fsdp to tp2, two replicas")
    way, left, travel = transport(sides.num_receivers), [number], ApartLink._travel
    first = sides.num_receivers + 1

    def spoil(link: ApartLink, arrived: torch.Tensor, message: torch.Tensor, received: list[int], sent: Any) -> None:
        travel(link, arrived, message, received, sent)
        ends = torch.tensor(received).cumsum(0)
        from_engine = [place for place in range(1, first) if received[place]]
        chosen = from_engine if lane == "engine to engine" else [0, *range(first, len(received))]
        chosen = [place for place in chosen if received[place]]
        if link._place == 2 and chosen:
            left[0] -= 1
            if not left[0]:
                arrived[ends[chosen[0]] - received[chosen[0]]] ^= 4

    with on_nodes(), mock.patch.object(ApartLink, "_travel", spoil):
        sent, received = sides.transfer(way, 1)
    peer = "sender rank" if lane == "policy to engine" else "receiver rank"
    for error in (sent[0], received[1]):
        assert isinstance(error, WeightSyncError)
        assert f"receiver rank 2 received from {peer}" in str(error)
        assert 0 < len(error.tensors) < len(sides.weights)
    assert all(isinstance(each, WeightSyncError) for each in (*sent, *received))
    # The same ends transfer over another connection.
    sent, received = sides.transfer(transport(sides.num_receivers), 2)
    assert sent[0] == [digest for _, digest in received]
    sides.close()


def test_a_rank_with_other_tensors_or_another_plan_is_named() -> None:
    sides = Sides("fsdp to tp2, two replicas")
    receive, made = sides.receive, exchange.plan_exchange

    def other(way: Transport, version: int, rank: int) -> Any:
        return receive(way, version + (rank == 3), rank)

    with mock.patch.object(sides, "receive", other):
        sent, received = sides.transfer(transport(sides.num_receivers), 1)
    assert "receiver rank 3 expects another manifest than the sender's" in str(sent[0])
    assert all(isinstance(each, WeightSyncError) for each in (*sent, *received))

    def differs(*arguments: Any, **settings: Any) -> Any:
        plan = made(*arguments, **settings)
        return replace(plan, waves=plan.waves[::-1]) if PLACE.rank == ("receiver", 4) else plan

    with mock.patch.object(exchange, "plan_exchange", differs):
        sent, received = sides.transfer(transport(sides.num_receivers), 1)
    assert "receiver rank 4 made another plan of the exchange" in str(sent[0])
    assert all(isinstance(each, WeightSyncError) for each in (*sent, *received))
    sides.close()


def test_a_policy_rank_that_fails_ends_the_transfer_of_all() -> None:
    sides, held = Sides("fsdp to tp2, two replicas"), holdings_of

    def fails(weights: Mapping[str, Weight], source: Source, rank: int, version: int) -> Holdings:
        if rank == 2:
            raise KeyError("no such layer")
        return held(weights, source, rank, version)

    with mock.patch.object(sys.modules[__name__], "holdings_of", fails):
        sent, received = sides.transfer(transport(sides.num_receivers), 1)
    assert isinstance(sent[2], KeyError)
    for error in (sent[0], sent[1], *received):
        assert isinstance(error, WeightSyncError)
        assert "sender rank 2 gave up" in str(error)
        assert "no such layer" in str(error)
    sides.close()


def test_only_changed_values_travel_to_another_node() -> None:
    """A hundredth of the values changes between two versions, and bits equal those of a transfer of all values."""
    sides, drawn = Sides("fsdp to tp2, two replicas"), values_of

    def nearly(weights: Mapping[str, Weight], version: int) -> dict[str, torch.Tensor]:
        values = drawn(weights, 0)
        generator = torch.Generator().manual_seed(version)
        for tensor in values.values():
            tensor[torch.rand(tensor.shape, generator=generator) < version / 200] *= -1
        return values

    way = replace(transport(sides.num_receivers), sends_changes=True)
    keeps = [sides.kept(rank) for rank in range(1, sides.num_receivers + 1)]
    num_bytes = []
    with on_nodes(), mock.patch.object(sys.modules[__name__], "values_of", nearly):
        for version in VERSIONS:
            sent, received = sides.transfer(way, version)
            assert sent[0] == [digest for _, digest in received]
            for (found, _), (expected, _) in zip(received, in_full(sides.weights, version, keeps), strict=True):
                assert [name for name in expected if not same(found[name], expected[name])] == []
            num_bytes.append(sum(end._links[0].num_bytes_sent for end in sides.senders))
        assert max(num_bytes[1:]) < num_bytes[0] / 4
        # A replica that was replaced comes over another connection, which begins with all values.
        sent, _ = sides.transfer(replace(transport(sides.num_receivers), sends_changes=True), 4)
        assert sum(end._links[0].num_bytes_sent for end in sides.senders) == num_bytes[0]
    sides.close()


PHASES = ("joining", "the beginning of a transfer", "planning the exchange", "bucket 3", "digests")


def end_in(phase: str, case: str, way: Transport, version: int, rank: int, is_sender: bool) -> None:
    """Be a rank, and end in a phase without a word."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run, travel = ApartLink._round, ApartLink._travel

    def report(link: ApartLink, own: Any, name: str, answer: Any) -> Any:
        return die() if name == phase else run(link, own, name, answer)

    def send(link: ApartLink, *arguments: Any) -> None:
        return die() if phase in link._phase else travel(link, *arguments)

    patches = [mock.patch.object(ApartLink, "_round", report), mock.patch.object(ApartLink, "_travel", send)]
    if phase == "joining":
        patches += [mock.patch.object(apart, name, die) for name in ("found_group", "join_offered")]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        sides = Sides(case)
        (sides.send if is_sender else sides.receive)(way, version, rank)


@pytest.mark.parametrize("victim", ["sender 0", "sender 1", "receiver 2"])
@pytest.mark.parametrize("phase", partly_exhaustive(list(PHASES), always=["bucket 3"]))
def test_a_killed_rank_is_named_soon_in_each_phase(phase: str, victim: str) -> None:
    """A source, the source that leads, and a target, which passes parts on to the other one."""
    side, rank = victim.split()[0], int(victim.split()[1])
    case = "fsdp2 to tp2"
    sides = Sides(case)
    way = transport(sides.num_receivers, timeout_s=600)
    peer = Peer(end_in, phase, case, way, 1, rank, side == "sender")

    def lost(end: Callable[..., Any], is_sender: bool, way: Transport, version: int, number: int) -> Any:
        return None if (is_sender, number) == (side == "sender", rank) else end(way, version, number)

    started = time.monotonic()
    with (
        mock.patch.object(sides, "send", partial(lost, sides.send, True)),
        mock.patch.object(sides, "receive", partial(lost, sides.receive, False)),
    ):
        sent, received = sides.transfer(way, 1)
    peer.end()
    assert time.monotonic() - started < SOON_S
    errors = [each for each in (*sent, *received) if each is not None]
    assert all(isinstance(each, WeightSyncError) for each in errors)
    name = "the sender" if victim == "sender 0" else f"{side} rank {rank}"
    assert [each for each in errors if f"lost {name}" not in str(each)] == []
    # A process in its place joins by another connection.
    sent, received = sides.transfer(transport(sides.num_receivers), 2)
    assert sent[0] == [digest for _, digest in received]
    sides.close()


def test_a_rank_that_hangs_is_a_time_out_in_its_phase() -> None:
    sides, travel = Sides("fsdp2 to tp2"), ApartLink._travel
    release = threading.Event()

    def hang(link: ApartLink, *arguments: Any) -> None:
        if link._place == 2 and "bucket 3" in link._phase:
            release.wait(SOON_S)
        travel(link, *arguments)

    with ThreadPoolExecutor(1) as pool, mock.patch.object(ApartLink, "_travel", hang):
        transfer = pool.submit(sides.transfer, transport(sides.num_receivers, timeout_s=2), 1)
        time.sleep(4)
        release.set()
        sent, received = transfer.result()
    for error in (*sent, *received):
        assert isinstance(error, WeightSyncError)
        assert re.search(r"timed out after 2 s: (sender|receiver) rank \d, bucket 3 of", str(error))
    sides.close()


def test_an_interrupted_transfer_ends_for_all() -> None:
    sides, travel = Sides("fsdp2 to tp2"), ApartLink._travel
    way = transport(sides.num_receivers, timeout_s=600)
    release = threading.Event()

    def hang(link: ApartLink, *arguments: Any) -> None:
        if link._place == 2 and "bucket 3" in link._phase:
            interrupt(way, "the replica is given up")
            release.wait(2)
        travel(link, *arguments)

    with mock.patch.object(ApartLink, "_travel", hang):
        sent, received = sides.transfer(way, 1)
    assert "interrupted during sender rank" in str(sent[0])
    assert all("the replica is given up" in str(each) for each in (*sent, *received))
    sides.close()
