"""Seconds of the phases of a step, from operations, bytes and the rates of a device's data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.facts.model_size import WIDE_BYTES
from rl_core.weights import ITEM_BYTES
from rl_launch.planning.accelerators import (
    ATTENTION,
    DECODE_MEMORY,
    DECODE_SECONDS,
    KERNEL_SECONDS,
    LAUNCH_SECONDS,
    MEMORY,
    OVERLAP_SLOWDOWN,
    TOKEN_SECONDS,
    WEIGHTS_MEMORY,
    Accelerator,
)
from rl_launch.planning.memory import HEAD_CHUNK, EngineRank, Recomputed, TrainingRank, layers_of_unit, whole_parameters
from rl_launch.planning.shapes import Shape
from rl_launch.planning.workload import Workload, num_microbatches

OPTIMIZER_BYTES = 28
"""Bytes read and written for each parameter by AdamW in float32."""
MOVED, MOVED_UNFUSED = 3.5, 9.0
"""Bytes that kernels other than products read and write, for each byte that a layer keeps, forward and backward."""
FORWARD_SHARE = 0.35
"""Share of them in the forward pass, which recomputation repeats."""
HEAD_BYTES = 11
"""Bytes that logprobs and their gradient move for each token and entry of the vocabulary, forward and backward; counted
in `benchmarks/results/ledger.md`."""
ADAPTER_PASSES = 6
"""Times that an adapter's kernels read or write a value of its input or output, forward and backward."""
LAUNCHES, LAUNCHES_UNFUSED, LAUNCHES_EXPERTS, LAUNCHES_ADAPTERS = 140, 170, 35, 60
"""Operations of a layer, forward and backward, and those that experts and adapters add. With fused kernels there are
52, but the host takes six times as long for one of those (`benchmarks/results/gpu_check.md`)."""
LAUNCHES_OPTIMIZER = 3
"""Operations of the optimizer for each tensor: its part of the norm, its update, and its copy in the compute dtype."""
TENSORS_OF_LAYER = 10
"""Tensors of a layer without experts, or with these stacked."""
LAUNCHES_HEAD = 22
"""Operations of the head for each chunk of tokens, forward and backward (`benchmarks/results/ledger.md`)."""
PIECE_BYTES = 2.4e6
"""Bytes that a decoding step could read in the time by which each expert takes longer than its bytes, so that an expert
of 4.7 MB, as of Qwen3-30B-A3B on two GPUs, is read at 0.6 of the bandwidth."""
DECODE_KERNELS = 9
"""Kernels of a layer in a decoding step next to its products and attention; experts and latent attention have as many
more each."""
REQUEST_SECONDS = 0.001
"""Seconds of a replica's host for each rollout next to its tokens, as measured (`benchmarks/results/plan_times.md`)."""
SYNC_SECONDS, TENSOR_SECONDS = 0.05, 1e-4
"""Seconds of a weight sync next to its bytes: agreement of the processes, and what the host does for each tensor
(`benchmarks/results/weight_sync.md`)."""


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

    @property
    def joined(self) -> int:
        """Ranks that the devices' own links join."""
        return max(self.ranks_per_node, self.accelerator.joined)


@dataclass(frozen=True)
class _Pass:
    """A pass over all rows of a step on the rank with the most layers.

    Args:
        rank: The rank.
        shape: Its shape.
        work: Rows of the step.
        machines: Devices.
        recomputed: Layers that the backward pass computes again.
        training: True for forward and backward, false for a forward pass.
    """

    rank: TrainingRank
    shape: Shape
    work: Workload
    machines: Machines
    recomputed: Recomputed | None
    training: bool

    @property
    def layers(self) -> int:
        return self.rank.layers

    @property
    def sparse_layers(self) -> int:
        return min(self.layers, self.shape.layers - self.shape.dense_layers)

    @property
    def tokens(self) -> float:
        """Tokens of the rows of a rank, of which context-parallel ranks each have a part."""
        return self.work.num_tokens / self.rank.layout.data

    @property
    def own_tokens(self) -> float:
        return self.tokens / self.rank.layout.context

    @property
    def count(self) -> float:
        """Microbatches of a rank."""
        return num_microbatches(self.rank.model, self.work, self.rank.layout.data, training=self.training)

    @property
    def flushes(self) -> float:
        """Times that the microbatches in flight end: once for each optimizer step."""
        return self.work.updates / self.work.passes if self.training else 1.0

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.rank.model.precision]

    def again(self, *, selective: bool) -> float:
        """Return the share of layers whose forward pass runs again, with or without those that only repeat kernels."""
        found = self.recomputed
        if not self.training or found is None or not found.layers:
            return 0.0
        return (found.full + found.selective * selective) / found.layers

    def kernels(self) -> float:
        """Return the seconds of products, attention and other kernels, which run after one another."""
        shape, layout, chip = self.shape, self.rank.layout, self.machines.accelerator
        inside, training = layout.tensor * layout.context, self.training
        trains_all = self.rank.trained.count >= 0.5 * self.rank.size.count
        times = (3.0 if trains_all else 2.0) if training else 1.0
        again, stage = self.again(selective=False), self.layers / shape.layers
        products = 2 * self.tokens * shape.products * stage / inside * (times + again)
        # Stages run at the speed of the slowest one, which has the head.
        products += 2 * self.tokens * shape.head_products / inside * times
        attending = self.work.num_rows / layout.data * shape.attention_flops(self.work.row) * stage / inside
        attending *= (3.5 if training else 1.0) + again
        kept = shape.kept(layout, self.itemsize, has_experts=bool(shape.experts)).none
        moved = (MOVED if layout.is_fused else MOVED_UNFUSED) * kept
        moved *= 1.0 + FORWARD_SHARE * self.again(selective=True) if training else FORWARD_SHARE
        bytes_moved = self.own_tokens * moved * self.layers
        lora = self.rank.model.lora_cfg
        if lora.enabled:
            ends = self.rank.trained.count / lora.dim * self.itemsize * stage / layout.tensor
            bytes_moved += self.own_tokens * ends * ADAPTER_PASSES * (1.0 if training else FORWARD_SHARE)
        bytes_moved += self.tokens / inside * shape.vocab * HEAD_BYTES * (1.0 if training else FORWARD_SHARE)
        seconds = products / (chip.products_share * chip.flops) + attending / (ATTENTION * chip.flops)
        return seconds + bytes_moved / (MEMORY * chip.memory_rate)

    def host(self) -> float:
        """Return the seconds of the host for its launches, which run ahead of the device."""
        launches: float = LAUNCHES if self.rank.layout.is_fused else LAUNCHES_UNFUSED
        launches += LAUNCHES_EXPERTS if self.shape.experts else 0
        launches += LAUNCHES_ADAPTERS if self.rank.model.lora_cfg.enabled else 0
        share = 1.0 + FORWARD_SHARE * self.again(selective=True) if self.training else FORWARD_SHARE
        chunks = self.own_tokens / (self.rank.model.logprob_chunk_size or HEAD_CHUNK)
        head = max(chunks, self.count) * LAUNCHES_HEAD * (1.0 if self.training else FORWARD_SHARE)
        return (self.count * launches * share * self.layers + head) * self.machines.launch_seconds

    def shards(self) -> float:
        """Return the seconds in which shards of layers are gathered, and their gradients reduced and scattered."""
        rank, layout, chip = self.rank, self.rank.layout, self.machines.accelerator
        if layout.data * layout.context == 1:
            return 0.0
        link = self._link(layout.tensor * layout.context * layout.data, self.machines.joined // layout.tensor)
        trained = whole_parameters(rank.trained, layout) * self.training
        if not layout.is_sharded:
            return self.flushes * trained * (WIDE_BYTES + self.itemsize) / link
        adds_up = "whole gradients" in rank.besides_activations(chip.memory)
        gathered = self.count * (2 if self.training else 1) * whole_parameters(rank.size, layout) * self.itemsize
        return (gathered + (self.flushes if adds_up else self.count) * trained * WIDE_BYTES) / link

    def waits(self) -> float:
        """Return the seconds of exchanges between the kernels of a layer, and of pipeline stages."""
        shape, layout, chip = self.shape, self.rank.layout, self.machines.accelerator
        joined = self.machines.joined
        times = (4 + 2 * self.again(selective=False)) if self.training else 2
        width = self.own_tokens * shape.hidden * self.itemsize
        seconds = 0.0
        if layout.tensor > 1:
            share = 2 * (layout.tensor - 1) / layout.tensor
            each = width * share / self._link(layout.tensor) + self.count * chip.latency(layout.tensor, joined)
            seconds += times * self.layers * each
        if layout.experts > 1:
            apart = layout.expert_ranks
            copies = float(min(shape.active, layout.experts))
            if not layout.joins_projections:
                # A token goes once to each rank that has experts of it.
                copies = layout.experts * (1 - (1 - 1 / layout.experts) ** shape.active)
            outside = max(0.0, 1 - joined / apart)
            inside = 1 - 1 / layout.experts - outside
            rates = inside / self._link(1), outside / self._link(apart)
            each = width * copies * max(rates) + self.count * chip.latency(apart, joined)
            # The host reads how many tokens go where, so that the device waits for the launch after it.
            seconds += self.sparse_layers * (times * each + self.count * self.machines.launch_seconds)
        if layout.pipeline > 1:
            ranks = layout.tensor * layout.context * layout.data
            sent = width / self._link(2 * ranks) + self.count * chip.latency(2 * ranks, joined)
            seconds += (2 if self.training else 1) * layout.chunks * sent
        return seconds

    def _link(self, ranks: int, of_node: int = 1) -> float:
        return self.machines.accelerator.link_rate(ranks, self.machines.joined, of_node=of_node)


def pass_seconds(
    rank: TrainingRank, work: Workload, machines: Machines, *, recomputed: Recomputed | None, training: bool
) -> float:
    """Return the seconds of one pass over all rows of a step: forward, or forward and backward.

    The host's launches run next to the kernels, and so do exchanges of shards: the longest counts. Kernels next to an
    exchange are slower, and nothing runs next to the exchange of the first unit of layers. Gradients of layers that are
    not shards are exchanged when the microbatches of an update have ended. Exchanges of tensor-parallel ranks, of
    experts and of pipeline stages do not overlap.
    """
    if rank.shape is None:
        return 0.0
    found = _Pass(rank, rank.shape, work, machines, recomputed, training)
    layout, computed, exchanged = rank.layout, max(found.kernels(), found.host()), found.shards()
    bubble = found.flushes * (layout.pipeline - 1) / (found.count * layout.chunks)
    if not layout.is_sharded:
        return (computed + found.waits()) * (1 + bubble) + exchanged
    hidden = exchanged * max(0.0, 1 - layers_of_unit(rank.size, rank.shape, layout, found.itemsize) / found.layers)
    overlapped = max(computed, hidden) + OVERLAP_SLOWDOWN * min(computed, hidden)
    return (overlapped + exchanged - hidden + found.waits()) * (1 + bubble)


def optimizer_seconds(rank: TrainingRank, work: Workload, machines: Machines) -> float:
    """Return the seconds of the optimizer steps of a step."""
    trained = rank.memory.gradients / WIDE_BYTES if rank.memory.gradients else rank.memory.host / (4 * WIDE_BYTES)
    rate = MEMORY * machines.accelerator.memory_rate
    if rank.layout.offloads:
        rate = machines.accelerator.host_rate
    tensors = 0 if rank.shape is None else TENSORS_OF_LAYER * rank.layers
    return work.updates * max(trained * OPTIMIZER_BYTES / rate, tensors * LAUNCHES_OPTIMIZER * machines.launch_seconds)


def decode_seconds(engine: EngineRank, slots: float, row: float, machines: Machines) -> float:
    """Return the seconds of one decoding step of an engine with so many sequences of this mean length.

    Products read the weights or compute, whichever takes longer; attention reads keys and values after them, and the
    other kernels of a layer take the least that a kernel takes.
    """
    shape, layout, chip = engine.shape, engine.layout, machines.accelerator
    if shape is None:
        return 0.0
    size = engine.size
    ranks = layout.tensor * layout.pipeline
    met = 1 - (1 - shape.active_share) ** slots if shape.experts else 1.0
    dense = (size.layers + size.head + (0 if size.head else size.embedding)) / ranks * layout.weight_bytes
    experts = size.experts * met / (ranks * layout.engines) * layout.weight_bytes
    flops = 2 * slots * (shape.products + shape.head_products) / ranks
    if shape.experts:
        # The beginning and the end of small tensors do not use all of the bandwidth.
        each = 3 * shape.hidden * shape.expert_inner / layout.tensor * layout.weight_bytes
        experts *= 1 + PIECE_BYTES / each
    read = (dense + experts) / (WEIGHTS_MEMORY * chip.memory_rate)
    kernels = max(read, flops / (chip.products_share * chip.flops))
    kernels += slots * row * engine.cache_of_token / (DECODE_MEMORY * chip.memory_rate)
    small = DECODE_KERNELS * (1 + shape.is_latent) * shape.dense_layers
    small += DECODE_KERNELS * (2 + shape.is_latent) * (shape.layers - shape.dense_layers)
    kernels += small / layout.pipeline * KERNEL_SECONDS
    if layout.tensor > 1:
        share = 2 * (layout.tensor - 1) / layout.tensor
        each = slots * shape.hidden * 2 * share / chip.link_rate(layout.tensor, machines.joined)
        kernels += 2 * shape.layers / layout.pipeline * (each + chip.latency(layout.tensor, machines.joined))
    own = DECODE_SECONDS + slots * TOKEN_SECONDS
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
    # While the batch shrinks, an eighth of it is there on average, with rows that are longer than the mean.
    long = work.prompt + (work.completion + work.longest) / 2
    tail = max(0.0, work.longest - work.completion) * decode_seconds(engine, max(1.0, slots / 8), long, machines)
    prompts = work.prompt * rows / work.group
    prefill = 2 * prompts * (shape.products + shape.head_products) / layout.tensor / (chip.products_share * chip.flops)
    return bulk + tail + prefill + work.num_rows / replicas * REQUEST_SECONDS


def sync_seconds(rank: TrainingRank, engine: EngineRank, machines: Machines, *, is_shared: bool) -> float:
    """Return the seconds of a weight sync: every rank of an engine receives its part, and hashes it at both ends."""
    received = engine.weights
    chip, layout, shape = machines.accelerator, rank.layout, rank.shape
    ranks = layout.data * layout.tensor * layout.pipeline * layout.context
    link = chip.link_rate(ranks, machines.joined, of_node=machines.joined)
    gathered = rank.size.count * ITEM_BYTES[rank.model.precision] / link if ranks > 1 else 0.0
    copied = received / (chip.host_rate if is_shared else chip.link_rate(10**6, machines.joined))
    tensors = 0
    if shape is not None:
        tensors = TENSORS_OF_LAYER * shape.layers + 3 * shape.experts * (shape.layers - shape.dense_layers)
    return gathered + copied + tensors * TENSOR_SECONDS + SYNC_SECONDS
