"""The layers that a model recomputes, chosen by the memory of its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from rl_core.model_config import ModelConfig
from rl_core.model_size import MOMENTS
from rl_core.torch.training.recompute import (
    WIDE,
    ActivationMemory,
    ActivationsUnknown,
    RecomputePlan,
    least_capacity,
    log_unknown,
    logit_bytes,
    max_tokens,
    passes_kept,
)
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.activations import activations_of
from rl_dtensor.parallel.accumulation import GradientMemory
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.fsdp import LAYERS_AHEAD
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.parallel.sizes import AxisSizes


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
    capacity = least_capacity(mesh.kind.capacity_bytes, mesh.control)
    if not capacity:
        return RecomputePlan()
    sizes, chunks = mesh.sizes, backend.pipeline_chunks_per_rank
    here = -(-len(layers) // sizes.pp)
    try:
        counted = activations_of(hf, layers, tensor_ranks=sizes.tp, splits_tokens=backend.sequence_parallel)
    except ActivationsUnknown as problem:
        if mesh.rank == 0:
            log_unknown(problem)
        return RecomputePlan(num_full=len(layers))
    parameters = RankParameters.of(hf, layers, here, sizes)
    memory = ActivationMemory(
        capacity,
        parameters.bytes_besides(config, backend, capacity, trains_all=trains_all),
        max_tokens(config, sizes.cp),
        passes_kept(sizes.pp, chunks),
    )
    return memory.choose(plans_of(here), counted[-here:], logs=mesh.rank == 0).of_chunks(chunks)


def plans_of(num_layers: int) -> list[RecomputePlan]:
    """Return the plans from the one that recomputes least to the one that recomputes most.

    Recomputing selectively costs little and comes first; then whole layers replace it, one after another.

    Args:
        num_layers: Number of layers.
    """
    selective = [RecomputePlan(0, num) for num in range(num_layers + 1)]
    return selective + [RecomputePlan(num, num_layers - num) for num in range(num_layers + 1)]


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
        logits = logit_bytes(config, self.vocab)
        kept = GradientMemory(state, self.whole * WIDE if trains_all else 0)
        choice = backend.gradient_accumulation
        keeps_whole = choice == "unsharded" or (choice == "auto" and kept.fits(capacity))
        return kept.state + gathered + logits + (kept.whole if keeps_whole else 0)
