"""Plans of exchanges, carried out on arrays: for random ways to split a model, and for three real ones on 512 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import Engine, Fsdp, Megatron, Weight, cut, whole

from rl_core import resharding
from rl_core.resharding import (
    IN_PLACE,
    INTO_NODE,
    ONWARD,
    TRAVELLING,
    ExchangePlan,
    PlannedTensor,
    Share,
    UnplannableError,
    assign_buckets,
    plan_exchange,
)
from rl_core.testing.exhaustive import partly_exhaustive

ITEM_BYTES = 2


def shares(split: Fsdp | Megatron | Engine, weights: Sequence[Weight], world: int) -> list[Share]:
    return [Share.of(split.boxes(weight, rank) for weight in weights) for rank in range(world)]


def small_model(num_layers: int, num_experts: int) -> list[Weight]:
    weights = [Weight((), "copied")]
    for layer in range(num_layers):
        weights += [Weight((24, 5), "rows", layer), Weight((6, 16), "columns", layer), Weight((7,), "copied", layer)]
        for expert in range(num_experts):
            weights += [Weight((8, 6), "rows", layer, expert), Weight((6, 8), "columns", layer, expert)]
    return weights


def carried_out(
    plan: ExchangePlan, held: Sequence[Share], kept: Sequence[Share], nodes: Sequence[int], wave_bytes: int
) -> int:
    """Carry out a plan and check what it promises; the bytes that enter nodes."""
    values = [np.arange(np.prod(each.shape), dtype=np.int64).reshape(each.shape) for each in plan.tensors]
    results = [[[np.full_like(values[t][cut(b)], -1) for b in s.boxes(t)] for s in kept] for t in range(len(values))]
    entering, done = 0, [0] * len(values)
    for wave in plan.waves:
        for way in (IN_PLACE, *TRAVELLING):
            traffic = np.zeros((2, len(held)))
            writes = []
            for tensor, number in wave.tensors:
                assert plan.tensors[tensor].bucket == wave.bucket
                pieces = plan.kinds[plan.kind_of[tensor]]
                pieces = pieces.at((pieces.wave == number) & (pieces.way == way))
                done[tensor] += len(pieces.way)
                for relayed, source, part, target, target_part, start, stop in zip(
                    *(each.tolist() for each in pieces[1:8]), strict=True
                ):
                    box = tuple(zip(start, stop, strict=True))
                    if relayed:
                        base = kept[source].boxes(tensor)[part]
                        at = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, base, strict=True))
                        value = results[tensor][source][part][at]
                        assert (value >= 0).all(), "it was sent on before it arrived"
                    else:
                        base = held[source].boxes(tensor)[part]
                        assert all(lo <= a < b <= hi for (a, b), (lo, hi) in zip(box, base, strict=True))
                        value = values[tensor][cut(box)]
                    if way != IN_PLACE:
                        size = -(-value.size * ITEM_BYTES // 8) * 8
                        traffic[0, source] += size
                        traffic[1, target] += size
                        assert source != target
                    assert (nodes[source] != nodes[target]) == (way in (INTO_NODE, ONWARD))
                    entering += value.size * ITEM_BYTES if nodes[source] != nodes[target] else 0
                    writes.append((tensor, target, target_part, box, value.copy()))
            assert traffic.max() <= wave_bytes
            assert traffic.any() <= (way in wave.ways)
            for tensor, target, part, box, value in writes:
                base = kept[target].boxes(tensor)[part]
                at = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, base, strict=True))
                assert (results[tensor][target][part][at] == -1).all(), "a value arrived twice"
                results[tensor][target][part][at] = value
    assert done == [len(plan.kinds[kind].way) for kind in plan.kind_of]
    for tensor, value in enumerate(values):
        for share, found in zip(kept, results[tensor], strict=True):
            for box, result in zip(share.boxes(tensor), found, strict=True):
                assert (result == value[cut(box)]).all()
    return entering


def least(tensors: Sequence[PlannedTensor], held: Sequence[Share], kept: Sequence[Share], nodes: Sequence[int]) -> int:
    """Bytes of the values that nodes keep and do not hold."""
    total = 0
    for tensor, planned in enumerate(tensors):
        for node in set(nodes):
            needed = np.zeros(planned.shape, bool)
            here = [rank for rank in range(len(held)) if nodes[rank] == node]
            for mask, of in ((True, kept), (False, held)):
                for box in (box for rank in here for box in of[rank].boxes(tensor)):
                    needed[cut(box)] = mask
            total += int(needed.sum()) * ITEM_BYTES
    return total


SIZES = st.sampled_from([1, 2])


@st.composite
def trainers(draw: st.DrawFn) -> Fsdp | Megatron:
    if draw(st.booleans()):
        shards = draw(st.sampled_from([1, 2, 3, 4]))
        ep = draw(st.sampled_from([ep for ep in (1, 2) if shards % ep == 0]))
        return Fsdp(draw(SIZES), draw(SIZES), shards, draw(SIZES), ep)
    dp = draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if dp % ep == 0]))
    return Megatron(draw(SIZES), dp, draw(SIZES), ep, draw(SIZES), draw(SIZES))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_every_value_arrives_once_and_enters_a_node_once(data: st.DataObject) -> None:
    trainer = data.draw(trainers())
    world = trainer.world
    tp = data.draw(st.sampled_from([size for size in (1, 2, 4) if world % size == 0]))
    pp = data.draw(st.sampled_from([size for size in (1, 2) if world % (size * tp) == 0]))
    engine = Engine(tp, pp, data.draw(st.booleans()), data.draw(st.booleans()))
    weights = small_model(2 * trainer.pp, data.draw(st.sampled_from([0, 4])))
    per_node = data.draw(st.integers(1, world))
    nodes = [rank // per_node for rank in range(world)]
    bucket_bytes = data.draw(st.sampled_from([512, 2048, 2**20]))
    kept = shares(engine, weights, world)
    order, tensors = in_buckets(weights, kept, bucket_bytes)
    weights = [weights[place] for place in order]
    held, kept = shares(trainer, weights, world), shares(engine, weights, world)
    check_buckets(tensors, kept, bucket_bytes)
    with mock.patch.object(resharding, "MIN_CUT_BYTES", data.draw(st.sampled_from([16, 2**16]))):
        plan, again = (plan_exchange(tensors, held, kept, nodes, wave_bytes=bucket_bytes) for _ in range(2))
    assert again.fingerprint == plan.fingerprint
    entered = carried_out(plan, held, kept, nodes, bucket_bytes)
    assert entered == least(tensors, held, kept, nodes)


def check_buckets(tensors: Sequence[PlannedTensor], kept: Sequence[Share], bucket_bytes: int) -> None:
    """No rank keeps more of a bucket than it may, except of one tensor."""
    for share in kept:
        of_bucket: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            size = sum(prod(stop - start for start, stop in box) for box in share.boxes(place)) * ITEM_BYTES
            if size:
                of_bucket.setdefault(tensor.bucket, []).append(size)
        assert all(len(sizes) == 1 or sum(sizes) <= bucket_bytes for sizes in of_bucket.values())


@pytest.mark.parametrize("per_node", [1, 2])
def test_what_one_rank_holds_leaves_it_once_and_reaches_all_nodes_over_all_links(per_node: int) -> None:
    """Eight nodes that keep all of it."""
    shape = (1024, 512)
    size, world = 1024 * 512 * ITEM_BYTES, 8 * per_node
    tensors = [PlannedTensor(shape, ITEM_BYTES, 0)]
    held = [Share.of([[whole(shape)] if rank == 0 else []]) for rank in range(world)]
    kept = [Share.of([[whole(shape)]]) for _ in range(world)]
    nodes = [rank // per_node for rank in range(world)]
    plan = plan_exchange(tensors, held, kept, nodes, wave_bytes=size)
    carried_out(plan, held, kept, nodes, size)
    (pieces,) = plan.kinds
    leaves, onward = pieces.at(pieces.way == INTO_NODE), pieces.at(pieces.way == ONWARD)
    assert leaves.num_values.sum() * ITEM_BYTES == size
    sent = np.bincount(onward.source, onward.num_values, minlength=world)[per_node:] * ITEM_BYTES
    assert sent.max() <= size / per_node


def test_empty_parts_and_tensors_that_nobody_keeps_send_nothing() -> None:
    tensors = [PlannedTensor((4, 3), ITEM_BYTES, 0), PlannedTensor((4, 3), ITEM_BYTES, 0), PlannedTensor((0, 3), 2, 0)]
    everything, nothing = (((0, 4), (0, 3)),), (((2, 2), (0, 3)),)
    held = [Share.of([everything, everything, (((0, 0), (0, 3)),)]), Share.of([nothing, nothing, ()])]
    kept = [Share.of([nothing, (), ()]), Share.of([everything, nothing, (((0, 0), (0, 3)),)])]
    assert assign_buckets(tensors, kept, 64) == [0, 0, 0]
    plan = plan_exchange(tensors, held, kept, [0, 1], wave_bytes=64)
    assert carried_out(plan, held, kept, [0, 1], 64) == 24
    assert [len(plan.kinds[kind].way) for kind in plan.kind_of] == [1, 0, 0]


def test_parts_that_overlap_or_leave_gaps_are_refused() -> None:
    tensors = [PlannedTensor((4,), ITEM_BYTES, 0)]
    kept = [Share.of([[((0, 4),)]])] * 2
    for second, problem in ((((1, 4),), "overlap"), (((3, 4),), "no rank holds")):
        with pytest.raises(UnplannableError, match=problem):
            plan_exchange(tensors, [Share.of([[((0, 2),)]]), Share.of([[second]])], kept, [0, 0], wave_bytes=64)


def test_a_large_tensor_that_one_rank_holds_is_divided_among_those_of_a_node() -> None:
    """Two nodes of four ranks that keep all of it."""
    shape = (4096, 512)
    tensors = [PlannedTensor(shape, ITEM_BYTES, 0)]
    held = [Share.of([[whole(shape)] if rank == 0 else []]) for rank in range(8)]
    kept = [Share.of([[whole(shape)]]) for _ in range(8)]
    pieces = plan_exchange(tensors, held, kept, [0] * 4 + [1] * 4, wave_bytes=2**20).kinds[0]
    into = pieces.at(pieces.way == INTO_NODE)
    entered = np.bincount(into.target, into.num_values, minlength=8)
    assert entered[4:].tolist() == [4096 * 512 / 4] * 4
    assert not (pieces.way == ONWARD).any()


def test_the_number_of_messages_follows_from_the_bytes_and_not_from_the_number_of_tensors() -> None:
    trainer, engine, nodes = Fsdp(shards=8), Engine(tp=2), [rank // 2 for rank in range(8)]
    counts = []
    for num_tensors in (16, 256):
        weights = [Weight((2**16 // num_tensors, 64), "rows")] * num_tensors
        held, kept = shares(trainer, weights, 8), shares(engine, weights, 8)
        _, tensors = in_buckets(weights, kept, 2**18)
        plan = plan_exchange(tensors, held, kept, nodes, wave_bytes=2**18)
        counts.append(sum(len(wave.ways) for wave in plan.waves))
    assert counts[0] == counts[1]


def llama_70b() -> list[Weight]:
    hidden, inner, layers = 8192, 28672, 80
    weights = [Weight((128256, hidden), "rows")]
    for layer in range(layers):
        weights += [Weight((width, hidden), "rows", layer) for width in (8192, 1024, 1024, inner, inner)]
        weights += [Weight((hidden, width), "columns", layer) for width in (8192, inner)]
        weights += [Weight((hidden,), "copied", layer)] * 2
    return [*weights, Weight((hidden,), "copied", layers - 1), Weight((128256, hidden), "rows", layers - 1)]


def qwen3_30b_a3b() -> list[Weight]:
    hidden, layers = 2048, 48
    weights = [Weight((151936, hidden), "rows")]
    for layer in range(layers):
        weights += [Weight((width, hidden), "rows", layer) for width in (4096, 512, 512)]
        weights += [Weight((hidden, 4096), "columns", layer), Weight((128, hidden), "copied", layer)]
        weights += [Weight((width,), "copied", layer) for width in (128, 128, hidden, hidden)]
        for expert in range(128):
            weights += [Weight((768, hidden), "rows", layer, expert)] * 2
            weights += [Weight((hidden, 768), "columns", layer, expert)]
    return [*weights, Weight((hidden,), "copied", layers - 1), Weight((151936, hidden), "rows", layers - 1)]


def deepseek_v3() -> list[Weight]:
    hidden, layers = 7168, 61
    weights = [Weight((129280, hidden), "rows")]
    for layer in range(layers):
        for shape in ((1536, hidden), (24576, 1536), (576, hidden), (32768, 512), (hidden, 16384)):
            weights.append(Weight(shape, "copied", layer))
        weights += [Weight((width,), "copied", layer) for width in (1536, 512, hidden, hidden)]
        inner = 18432 if layer < 3 else 2048
        weights += [Weight((inner, hidden), "rows", layer)] * 2 + [Weight((hidden, inner), "columns", layer)]
        if layer >= 3:
            weights += [Weight((256, hidden), "copied", layer), Weight((256,), "copied", layer)]
            for expert in range(256):
                weights += [Weight((2048, hidden), "rows", layer, expert)] * 2
                weights += [Weight((hidden, 2048), "columns", layer, expert)]
    return [*weights, Weight((hidden,), "copied", layers - 1), Weight((129280, hidden), "rows", layers - 1)]


WORLD, NODE = 512, 8
BUCKET_BYTES = 256 * 2**20
MAX_PLAN_S = 20.0
"""Of one core, on a machine that runs other tests as well."""
NIC, LINK = 45e9, 300e9
"""Bytes that a GPU sends, or receives, in a second: to other nodes, and within its node."""


def shares_by_kind(
    split: Fsdp | Megatron | Engine, weights: Sequence[Weight], alike: Callable[[int], object]
) -> list[Share]:
    """As `shares`, for large models: ranks for which `alike` is the same have the same parts."""
    stages = 1 if isinstance(split, Engine) else split.pp
    kinds: dict[Weight, int] = {}
    keys = [Weight(each.shape, each.kind, each.layer % stages, each.expert) for each in weights]
    kind_of = np.array([kinds.setdefault(key, len(kinds)) for key in keys])
    found: dict[object, Share] = {}
    for rank in range(WORLD):
        if alike(rank) not in found:
            of_kind = Share.of(split.boxes(kind, rank) for kind in kinds)
            found[alike(rank)] = Share(of_kind.choices, of_kind.chosen[kind_of])
    return [found[alike(rank)] for rank in range(WORLD)]


def in_buckets(
    weights: Sequence[Weight], kept: Sequence[Share], bucket_bytes: int
) -> tuple[list[int], list[PlannedTensor]]:
    """The order of a transfer, and its tensors."""
    tensors = [PlannedTensor(each.shape, ITEM_BYTES, 0) for each in weights]
    buckets = assign_buckets(tensors, kept, bucket_bytes)
    order = sorted(range(len(weights)), key=lambda place: buckets[place])
    return order, [tensors[place]._replace(bucket=buckets[place]) for place in order]


def seconds(plan: ExchangePlan, world: int) -> tuple[float, float, float]:
    """By the rates of the links: of the plan, of the links that are busy longest, and bytes that enter nodes.

    All ranks wait for the slowest on each way of each wave.
    """
    first = {int(kind): place for place, kind in reversed(list(enumerate(plan.kind_of)))}
    loads: dict[tuple[int, int], np.ndarray] = {}
    for kind, pieces in enumerate(plan.kinds):
        for number in range(int(pieces.wave.max(initial=0)) + 1):
            chosen = pieces.at(pieces.wave == number)
            size = chosen.num_values * plan.tensors[first[kind]].item_bytes
            loads[kind, number] = np.stack(
                [
                    np.bincount(side, np.where(chosen.way == way, size, 0), minlength=world)
                    for way in TRAVELLING
                    for side in (chosen.source, chosen.target)
                ]
            )
    total, took = np.zeros((6, world)), 0.0
    for wave in plan.waves:
        load = np.zeros((6, world))
        for tensor, number in wave.tensors:
            load += loads[int(plan.kind_of[tensor]), number]
        took += sum(load[2 * i : 2 * i + 2].max() / rate for i, rate in enumerate((NIC, NIC, LINK)))
        total += load
    entered = total[1] + total[3]
    # Nodes share what enters them.
    per_rank = entered.reshape(-1, NODE).mean(axis=1).repeat(NODE)
    return took, (per_rank / NIC + total[5] / LINK).max(), entered.sum()


CASES = {
    "qwen3-30b-a3b": (qwen3_30b_a3b, Fsdp(shards=WORLD), Engine(tp=2)),
    "llama-70b": (llama_70b, Megatron(pp=8, dp=16, tp=4), Engine(tp=8)),
    "deepseek-v3": (deepseek_v3, Megatron(pp=16, dp=32, ep=32), Engine(tp=32, has_ep=True, divides_dense=False)),
}


@pytest.mark.parametrize("case", partly_exhaustive(list(CASES), always=["qwen3-30b-a3b", "llama-70b"]))
def test_a_real_model_on_512_ranks_takes_at_most_twice_the_time_of_the_busiest_link(case: str) -> None:
    model, trainer, engine = CASES[case]
    weights = model()
    held = shares_by_kind(trainer, weights, lambda rank: rank)
    kept = shares_by_kind(engine, weights, lambda rank: rank % (engine.tp * engine.pp))
    nodes = [rank // NODE for rank in range(WORLD)]
    began = time.process_time()
    order, tensors = in_buckets(weights, kept, BUCKET_BYTES)
    held, kept = ([Share(each.choices, each.chosen[order]) for each in shares] for shares in (held, kept))
    plan = plan_exchange(tensors, held, kept, nodes, wave_bytes=BUCKET_BYTES)
    assert time.process_time() - began < MAX_PLAN_S
    took, floor, entered = seconds(plan, WORLD)
    # Every node takes in a model, less the values that its ranks hold and keep, and nothing twice.
    size = sum(prod(each.shape) for each in weights) * ITEM_BYTES * WORLD / NODE
    assert entered < size
    assert took < 2 * floor
