"""Seconds of the phases of a step, from operations, bytes and the rates of a device's data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.facts.model_size import WIDE_BYTES
from rl_core.weights import ITEM_BYTES
from rl_launch.planning.accelerators import (
    ATTENTION,
    DECODE_MEMORY,
    DECODE_SECONDS,
    LAUNCH_SECONDS,
    MEMORY,
    Accelerator,
)
from rl_launch.planning.memory import EngineRank, Recomputed, TrainingRank, whole_parameters
from rl_launch.planning.workload import Workload, num_microbatches

OPTIMIZER_BYTES = 28
"""Bytes read and written for each parameter by AdamW in float32."""
MOVED, MOVED_UNFUSED = 3.5, 9.0
"""Bytes that kernels other than products read and write, for each byte that a layer keeps, forward and backward."""
FORWARD_SHARE = 0.35
"""Share of them in the forward pass."""
LAUNCHES, LAUNCHES_UNFUSED, LAUNCHES_EXPERTS = 140, 170, 35
"""Operations of a layer, forward and backward, and those that experts add. With fused kernels there are 52, but the
host takes six times as long for one of those (`benchmarks/results/gpu_check.md`)."""
REQUEST_SECONDS = 0.001
"""Seconds of a replica's host for each rollout next to its tokens, as measured (`benchmarks/results/plan_times.md`)."""
SYNC_SECONDS = 0.05
"""Seconds of a weight sync next to its bytes: agreement of the processes, and verification."""


@dataclass(frozen=True)
class Machines:
    """Devices of a plan, and the speed of this machine's host.

    Args:
        accelerator: The device.
        ranks_per_node: Ranks of a node.
        launch_seconds: Seconds of the host for an operation.
    """

    accelerator: Accelerator
    ranks_per_node: int
    launch_seconds: float = LAUNCH_SECONDS


def pass_seconds(
    rank: TrainingRank, work: Workload, machines: Machines, *, recomputed: Recomputed | None, training: bool
) -> float:
    """Return the seconds of one pass over all rows of a step: forward, or forward and backward.

    Products, attention and the other kernels run after one another. The host's launches run next to them, unless
    experts are on several ranks, and so do exchanges of shards; the longer of each counts. Exchanges of tensor-parallel
    ranks and of experts do not overlap.
    """
    shape, layout, chip = rank.shape, rank.layout, machines.accelerator
    if shape is None:
        return 0.0
    # Operations of one of the ranks that share a model.
    data, inside = layout.data, layout.tensor * layout.context
    tokens = work.num_tokens / data
    count = num_microbatches(rank.model, work, data, training=training)
    trains_all = rank.trained.count >= 0.5 * rank.size.count
    times = (3.0 if trains_all else 2.0) if training else 1.0
    again = 0.0
    if training and recomputed is not None and recomputed.layers:
        again = recomputed.full / recomputed.layers
    per_stage = 1 / layout.pipeline
    products = 2 * tokens * shape.products * per_stage / inside * (times + again)
    head = 2 * tokens * shape.head_products / inside * times * per_stage
    attending = work.num_rows / data * shape.attention_flops(work.row) * per_stage / inside
    attending *= (3.5 if training else 1.0) + again
    peak = chip.flops
    compute = (products + head) / (chip.products_share * peak) + attending / (ATTENTION * peak)
    itemsize = ITEM_BYTES[rank.model.precision]
    kept = shape.kept(layout, itemsize, has_experts=bool(shape.experts)).none
    moved = (MOVED if layout.is_fused else MOVED_UNFUSED) * kept * (1.0 if training else FORWARD_SHARE)
    compute += tokens / layout.context * moved * shape.layers * per_stage / (MEMORY * chip.memory_rate)
    launches: float = LAUNCHES if layout.is_fused else LAUNCHES_UNFUSED
    launches += LAUNCHES_EXPERTS if shape.experts else 0
    launches *= (1.0 + again / 3) if training else FORWARD_SHARE
    host = count * launches * shape.layers * per_stage * machines.launch_seconds
    exchanged = 0.0
    ranks, of_node = inside * data, machines.ranks_per_node // layout.tensor
    link = chip.link_rate(ranks, machines.ranks_per_node, of_node=of_node)
    if layout.is_sharded and data * layout.context > 1:
        whole = whole_parameters(rank.size, layout)
        gathers = count * (2 if training else 1) * whole * itemsize
        if training:
            gathers += work.updates / work.passes * whole_parameters(rank.trained, layout) * WIDE_BYTES
        exchanged = gathers / link
    elif training and data > 1:
        whole = whole_parameters(rank.trained, layout)
        exchanged = work.updates / work.passes * whole * (WIDE_BYTES + itemsize)
        exchanged /= link
    waits = 0.0
    if layout.tensor > 1:
        share = 2 * (layout.tensor - 1) / layout.tensor
        each = tokens / layout.context * shape.hidden * itemsize * share * shape.layers * per_stage
        waits += each * (4 if training else 2) / chip.link_rate(layout.tensor, machines.ranks_per_node)
        late = chip.latency(layout.tensor, machines.ranks_per_node)
        waits += count * shape.layers * per_stage * (4 if training else 2) * late
    if layout.experts > 1:
        copies = min(shape.active, layout.experts) * (layout.experts - 1) / layout.experts
        sparse = (shape.layers - shape.dense_layers) * per_stage
        each = tokens / layout.context * copies * shape.hidden * itemsize * sparse
        apart = layout.expert_ranks
        waits += each * (4 if training else 2) / chip.link_rate(apart, machines.ranks_per_node)
        waits += count * sparse * (4 if training else 2) * chip.latency(apart, machines.ranks_per_node)
    bubble = (layout.pipeline - 1) / (count * layout.chunks)
    # The host reads in each layer how many tokens go to which experts, so that its launches do not run ahead.
    computed = compute + host if layout.experts > 1 else max(compute, host)
    return (max(computed, exchanged) + waits) * (1 + bubble)


def optimizer_seconds(rank: TrainingRank, work: Workload, machines: Machines) -> float:
    """Return the seconds of the optimizer steps of a step."""
    trained = rank.memory.gradients / WIDE_BYTES if rank.memory.gradients else rank.memory.host / (4 * WIDE_BYTES)
    rate = MEMORY * machines.accelerator.memory_rate
    if rank.layout.offloads:
        rate = machines.accelerator.host_rate
    return work.updates * trained * OPTIMIZER_BYTES / rate


def decode_seconds(engine: EngineRank, slots: float, row: float, machines: Machines) -> float:
    """Return the seconds of one decoding step of an engine with so many sequences of this mean length."""
    shape, layout, chip = engine.shape, engine.layout, machines.accelerator
    if shape is None:
        return 0.0
    size = engine.size
    met = 1 - (1 - shape.active_share) ** slots if shape.experts else 1.0
    dense = (size.layers + size.head + (0 if size.head else size.embedding)) / layout.tensor
    experts = size.experts * met / (layout.tensor * layout.engines)
    read = (dense + experts) * layout.weight_bytes / layout.pipeline
    read += slots * row * engine.cache_of_token
    flops = 2 * slots * (shape.products + shape.head_products) / (layout.tensor * layout.pipeline)
    kernels = max(read / (DECODE_MEMORY * chip.memory_rate), flops / (chip.products_share * chip.flops))
    if layout.tensor > 1:
        share = 2 * (layout.tensor - 1) / layout.tensor
        bytes_each = slots * shape.hidden * 2 * share * shape.layers
        kernels += 2 * bytes_each / chip.link_rate(layout.tensor, machines.ranks_per_node)
        kernels += 2 * shape.layers / layout.pipeline * chip.latency(layout.tensor, machines.ranks_per_node)
    own = DECODE_SECONDS
    if layout.is_eager:
        own = LAUNCHES_UNFUSED * FORWARD_SHARE * shape.layers * machines.launch_seconds
    return layout.pipeline * kernels + own


def generation_seconds(engine: EngineRank, cache: float, work: Workload, replicas: int, machines: Machines) -> float:
    """Return the seconds until all rollouts of a step have ended, on so many replicas.

    The engine decodes as many sequences at a time as its cache holds. When the last ones have begun, the longest of
    them runs on in a batch that shrinks. The host's time for requests comes on top.
    """
    shape, chip, layout = engine.shape, machines.accelerator, engine.layout
    if shape is None or not replicas:
        return 0.0
    engines = replicas * layout.engines
    rows = work.num_rows / engines
    slots = min(rows, engine.slots(cache, work.row))
    middle = work.prompt + work.completion / 2
    step = decode_seconds(engine, slots, middle, machines)
    bulk = rows * work.completion / slots * step
    # While the batch shrinks, half of it is there on average.
    tail = max(0.0, work.longest - work.completion) * decode_seconds(engine, max(1.0, slots / 8), work.row, machines)
    prompts = work.prompt * rows / work.group
    prefill = 2 * prompts * (shape.products + shape.head_products) / layout.tensor / (chip.products_share * chip.flops)
    return bulk + tail + prefill + work.num_rows / replicas * REQUEST_SECONDS


def sync_seconds(rank: TrainingRank, engine: EngineRank, machines: Machines, *, is_shared: bool) -> float:
    """Return the seconds of a weight sync: every rank of an engine receives its part, and hashes it at both ends."""
    received = engine.weights
    itemsize = ITEM_BYTES[rank.model.precision]
    chip, layout = machines.accelerator, rank.layout
    gathered = whole_parameters(rank.size, layout) * itemsize * layout.pipeline * layout.tensor
    ranks = layout.data * layout.tensor * layout.pipeline * layout.context
    link = chip.link_rate(ranks, machines.ranks_per_node, of_node=machines.ranks_per_node)
    copied = received / (chip.host_rate if is_shared else chip.link_rate(10**6, machines.ranks_per_node))
    return gathered / link + copied + SYNC_SECONDS
