"""The layers that a model recomputes, chosen by the memory of its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from rl_core.data.microbatch import Batching
from rl_core.model_config import ModelConfig
from rl_core.torch.heads.logprobs import CHUNK_SIZE
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.activations import ActivationsUnknown, LayerActivations, activations_of
from rl_dtensor.model.recompute import RecomputePlan
from rl_dtensor.parallel.accumulation import MOMENTS, GradientMemory
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.fsdp import LAYERS_AHEAD
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.parallel.sizes import AxisSizes

_log = logging.getLogger(__name__)

USABLE = 0.9
"""Share of a device's memory that is planned with; communication, fragmentation and small tensors have the rest."""
LOGIT_COPIES = 3
"""Float32 tensors of the size of a chunk's logits that the head has at one time."""
WIDE = torch.float32.itemsize


def recompute_plan(
    config: ModelConfig,
    backend: DTensorConfig,
    hf: PreTrainedModel,
    layers: Sequence[nn.Module],
    *,
    mesh: Mesh,
    trains_all: bool,
) -> RecomputePlan:
    """The plan for each run of layers of a rank, the same on every rank; collective.

    Args:
        config: Model's config, whose microbatches decide how many activations there are.
        backend: Settings of this backend.
        hf: Whole model on `meta`, in the dtype that it computes in.
        layers: Its repeated layers.
        mesh: Mesh of the run.
        trains_all: True if all weights train, rather than adapters.
    """
    if backend.recompute == "none":
        return RecomputePlan()
    if backend.recompute == "full":
        return RecomputePlan(num_full=len(layers))
    if backend.recompute == "selective":
        return RecomputePlan(num_selective=len(layers))
    capacity = _least(mesh.kind.capacity_bytes, mesh.control)
    if not capacity:
        return RecomputePlan()
    sizes, chunks = mesh.sizes, backend.pipeline_chunks_per_rank
    here = -(-len(layers) // sizes.pp)
    try:
        counted = activations_of(hf, layers, tensor_ranks=sizes.tp, splits_tokens=backend.sequence_parallel)
    except ActivationsUnknown as problem:
        _say(mesh, "recompute=auto recomputes whole layers: their activations cannot be counted (%s)", problem)
        return RecomputePlan(num_full=len(layers))
    tokens, passes = _tokens(config, sizes), _passes_kept(sizes.pp, chunks)
    parameters = RankParameters.of(hf, layers, here, sizes)
    room = round(USABLE * capacity) - parameters.bytes_besides(config, backend, capacity, trains_all=trains_all)
    held = counted[-here:]
    plan = smallest_plan(held, tokens, room, passes=passes, has_selective=not backend.compile)
    _say(
        mesh,
        "recompute=auto recomputes %s: %.1f GB of %.1f GB are left for activations of %.1f microbatches of %d tokens, "
        "which take %.1f GB without recomputation and %.1f GB with it in full",
        plan.in_words(here),
        max(room, 0) / 1e9,
        capacity / 1e9,
        passes,
        tokens,
        passes * tokens * sum(layer.none for layer in held) / 1e9,
        passes * tokens * sum(layer.full for layer in held) / 1e9,
    )
    return RecomputePlan(-(-plan.num_full // chunks), -(-plan.num_selective // chunks))


def smallest_plan(
    layers: Sequence[LayerActivations],
    tokens: int,
    room: int,
    *,
    passes: float = 1.0,
    has_selective: bool = True,
) -> RecomputePlan:
    """The plan that recomputes least and whose activations fit; the largest if none does.

    Recomputing selectively costs little and comes first; then whole layers replace it, one after another.

    Args:
        layers: What each layer keeps of a token.
        tokens: Tokens of a microbatch.
        room: Bytes for activations.
        passes: Microbatches whose activations exist at one time.
        has_selective: False if layers can only be recomputed as a whole.
    """
    count = len(layers)
    plans = [RecomputePlan(0, num) for num in range(count + 1)] if has_selective else []
    plans += [RecomputePlan(num, count - num if has_selective else 0) for num in range(count + 1)]
    # a layer that is recomputed has all of its activations while its backward pass runs
    again = tokens * max(layer.none for layer in layers)

    def needed(plan: RecomputePlan) -> float:
        return passes * tokens * _kept(layers, plan) + (again if plan != RecomputePlan() else 0)

    return next((plan for plan in plans if needed(plan) <= room), RecomputePlan(count))


def _kept(layers: Sequence[LayerActivations], plan: RecomputePlan) -> int:
    """Bytes per token of all layers under a plan."""
    until = plan.num_full + plan.num_selective
    return (
        sum(layer.full for layer in layers[: plan.num_full])
        + sum(layer.selective for layer in layers[plan.num_full : until])
        + sum(layer.none for layer in layers[until:])
    )


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of a rank, and of what a pass gathers of them.

    Args:
        whole: In its layers and at the ends of the model, not sharded by FSDP.
        sharded: In its shards of these.
        layer: In its largest layer, not sharded.
        ends: In embedding, head and the rest outside of layers, not sharded.
        itemsize: Bytes of each in the dtype that the model computes in.
        vocab: Tokens that its part of the head has.
    """

    whole: int
    sharded: int
    layer: int
    ends: int
    itemsize: int
    vocab: int

    @classmethod
    def of(cls, hf: PreTrainedModel, layers: Sequence[nn.Module], here: int, sizes: AxisSizes) -> RankParameters:
        """Count a whole model.

        Args:
            hf: The model, on `meta`.
            layers: Its repeated layers.
            here: Number of layers that a rank has.
            sizes: Ranks along each axis.
        """
        in_experts = {id(each) for module in expert_modules(hf) for each in module.parameters()}
        in_layers = {id(each) for layer in layers for each in layer.parameters()}

        def split(layer: nn.Module) -> tuple[int, int]:
            """Parameters of a rank, of experts and others."""
            held = list(layer.parameters())
            experts = sum(each.numel() for each in held if id(each) in in_experts)
            return experts // (sizes.ep * sizes.tp), (sum(each.numel() for each in held) - experts) // sizes.tp

        by_layer = [split(layer) for layer in layers]
        outside = [each.numel() // sizes.tp for each in hf.parameters() if id(each) not in in_layers]
        # the first stage has the embedding, the last one the head
        ends = sum(outside) if sizes.pp == 1 else max(outside, default=0)
        experts = sum(each for each, _ in by_layer[-here:])
        dense = sum(each for _, each in by_layer[-here:]) + ends
        sharded = dense // sizes.fsdp + experts // (sizes.fsdp // sizes.ep)
        parameter = next(hf.parameters())
        return cls(
            dense + experts,
            sharded,
            max(sum(each) for each in by_layer),
            ends,
            parameter.element_size(),
            hf.config.get_text_config().vocab_size // sizes.tp,
        )

    def bytes_besides(self, config: ModelConfig, backend: DTensorConfig, capacity: int, *, trains_all: bool) -> int:
        """Bytes of a rank's device next to activations: state, gathered layers and their gradients, logits."""
        each = WIDE * (2 + MOMENTS) if trains_all else self.itemsize
        state = 0 if backend.cpu_offload else self.sharded * each
        grads = self.itemsize + WIDE if trains_all else 0
        gathered = self.layer * ((1 + LAYERS_AHEAD) * self.itemsize + 2 * grads) + self.ends * (self.itemsize + grads)
        # by default kernels take larger chunks, in no more memory
        logits = LOGIT_COPIES * WIDE * (config.logprob_chunk_size or CHUNK_SIZE) * self.vocab
        kept = GradientMemory(state, self.whole * WIDE if trains_all else 0)
        choice = backend.gradient_accumulation
        keeps_whole = choice == "unsharded" or (choice == "auto" and kept.fits(capacity))
        return kept.state + gathered + logits + (kept.whole if keeps_whole else 0)


def _tokens(config: ModelConfig, sizes: AxisSizes) -> int:
    """Maximum number of tokens of a microbatch on a rank."""
    batching = Batching.of(config, training=True)
    rows = batching.max_rows or 1
    longest = config.max_total_sequence_length
    return max(batching.max_tokens or rows * longest, longest) // sizes.cp


def _passes_kept(pp: int, chunks: int) -> float:
    """Microbatches whose activations the first pipeline rank holds of all its layers, at most."""
    if chunks == 1:
        return pp
    return (2 * (pp - 1) + (chunks - 1) * pp + 1) / chunks


def _least(capacity: int | None, group: dist.ProcessGroup) -> int:
    """The smallest capacity of all ranks; 0 if a device has none of its own."""
    least = torch.tensor(capacity or 0)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least.item())


def _say(mesh: Mesh, message: str, *values: object) -> None:
    if mesh.rank == 0:
        _log.info(message, *values)
