"""The activations that the backward pass computes again, as fields of Megatron's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from transformers import PreTrainedConfig

from rl_core.model_config import ModelConfig
from rl_core.torch.training.recompute import (
    ActivationMemory,
    ActivationsUnknown,
    RecomputePlan,
    least_capacity,
    log_unknown,
    logit_bytes,
    max_tokens,
    passes_kept,
)
from rl_megatron.config import MegatronConfig
from rl_megatron.conversion.splits import padded_vocab
from rl_megatron.model.activations import LayerShape, LayerShapes
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.rank_memory import RankParameters
from rl_megatron.transformer_fields import RECOMPUTED_WITH_TE


def recompute_fields(
    config: ModelConfig,
    backend: MegatronConfig,
    hf: PreTrainedConfig,
    shape: TransformerConfig,
    *,
    mesh: Mesh,
    has_te: bool,
    trains: bool,
) -> dict[str, Any]:
    """Return the fields of Megatron's config that choose what is recomputed, the same on every rank; collective.

    Args:
        config: Model's config, whose microbatches decide how many activations there are.
        backend: Settings of this backend.
        hf: Hugging Face config of the model.
        shape: Megatron's, without these fields.
        mesh: Mesh of the run.
        has_te: True if the layers are Transformer Engine's.
        trains: False for a model that never runs backwards.

    Raises:
        ValueError: If parts are to be recomputed that these layers do not support.
    """
    choice = backend.recompute if trains else "none"
    if choice == "none":
        return {}
    modules = recomputed_modules(backend, shape, has_te=has_te)
    if choice == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if choice == "full":
        return whole
    capacity = least_capacity(mesh.kind.capacity_bytes, mesh.control)
    if not capacity:
        return {}
    chunks = shape.virtual_pipeline_model_parallel_size or 1
    try:
        shapes = LayerShapes(shape, has_te=has_te, longest=config.max_total_sequence_length).layers()
    except ActivationsUnknown as problem:
        if mesh.rank == 0:
            log_unknown(problem)
        return whole
    held = shapes[-layers_per_rank(shape) :]
    parameters = rank_parameters(hf, shape, held, mesh)
    state = parameters.memory(backend, trains_all=not config.lora_cfg.enabled)
    memory = ActivationMemory(
        capacity,
        round(state.device) + logit_bytes(config, parameters.vocab),
        max_tokens(config, mesh.layout["cp"]),
        passes_kept(mesh.layout["pp"], chunks),
    )
    kept = [layer.activations(modules) for layer in held]
    plan = memory.choose(plans_of(held, modules), kept, logs=mesh.rank == 0)
    if plan.num_selective:
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    if plan.num_full:
        number = plan.of_chunks(chunks).num_full
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": number}
    return {}


def layers_per_rank(config: TransformerConfig) -> int:
    """Return the maximum number of layers of a pipeline rank."""
    layout: Any = config.pipeline_model_parallel_layout
    if layout is not None:
        return max(sum(stage.count(LayerType.decoder) for stage in stages) for stages in layout.layout)
    ends = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    given = [number for number in ends if number is not None]
    others = config.pipeline_model_parallel_size - len(given)
    return max(given + ([(config.num_layers - sum(given)) // others] if others else []))


def parts_of(config: TransformerConfig) -> set[str]:
    """Return the names of the parts that a model's layers have."""
    pattern = config.moe_layer_freq
    has_experts = config.num_moe_experts is not None
    has_dense = not has_experts or (pattern != 1 if isinstance(pattern, int) else 0 in pattern)
    return {
        "core_attn",
        *(["layernorm"] if has_experts or config.multi_latent_attention else []),
        *(["mla_up_proj"] if config.multi_latent_attention else []),
        *(["mlp"] if has_dense else []),
        *(["moe", "moe_act"] if has_experts else []),
        *(["shared_experts"] if config.moe_shared_expert_intermediate_size is not None else []),
    }


def cheap_modules(config: TransformerConfig, *, has_te: bool) -> list[str]:
    """Return the parts that selective recomputation covers unless they are given: those with few products if there are
    some, otherwise the larger part of a layer."""
    with_8_bit = {"layernorm", "moe_act"} if config.fp8 and config.fp8_recipe == "delayed" else set()
    cheap = (parts_of(config) & RECOMPUTED_WITH_TE) - with_8_bit if has_te else set()
    return sorted(cheap) or ["mlp" if config.num_moe_experts is None else "moe"]


def recomputed_modules(backend: MegatronConfig, config: TransformerConfig, *, has_te: bool) -> list[str]:
    """Return the parts that selective recomputation covers.

    Raises:
        ValueError: If the layers do not support one of them.
    """
    modules = list(backend.recompute_modules or cheap_modules(config, has_te=has_te))
    missing = [name for name in modules if name in RECOMPUTED_WITH_TE and not has_te]
    if missing:
        raise ValueError(
            f"megatron_cfg.recompute_modules {missing} needs Transformer Engine, which is not installed or not used "
            "on cpu; remove them, or install rl-megatron[te]"
        )
    absent = sorted({*modules} - parts_of(config))
    if absent:
        raise ValueError(
            f"megatron_cfg.recompute_modules {absent}: the model's layers have no such part, or none that can be "
            f"recomputed separately; allowed: {', '.join(sorted(parts_of(config)))}"
        )
    return modules


def plans_of(layers: Sequence[LayerShape], modules: Sequence[str]) -> list[RecomputePlan]:
    """Return the plans that Megatron can run, from the one with the fewest recomputed products to the one with most.

    Megatron recomputes either parts of all layers, or some layers as a whole.

    Args:
        layers: Layers of a rank.
        modules: Parts that selective recomputation covers.
    """
    selective = RecomputePlan(num_selective=len(layers))
    costs = {RecomputePlan(): 0.0, selective: sum(layer.products_of(modules) for layer in layers)}
    for number in range(1, len(layers) + 1):
        costs[RecomputePlan(num_full=number)] = sum(layer.whole.products for layer in layers[:number])
    return sorted(costs, key=lambda plan: (costs[plan], plan.num_full))


def rank_parameters(
    hf: PreTrainedConfig, config: TransformerConfig, layers: Sequence[LayerShape], mesh: Mesh
) -> RankParameters:
    """Count the parameters of the last pipeline rank.

    Args:
        hf: Hugging Face config of the model.
        config: Megatron's.
        layers: Layers of that rank.
        mesh: Mesh of the run.
    """
    sizes = mesh.layout
    tensor, stages = sizes["tp"], sizes["pp"]
    shard = padded_vocab(hf.vocab_size, tensor) // tensor
    has_both_ends = stages == 1 and not hf.tie_word_embeddings
    dense = shard * config.hidden_size * (2 if has_both_ends else 1)
    experts = 0.0
    for layer in layers:
        dense += layer.whole.weights
        experts += layer.whole.expert_weights
    ranks = sizes["world"] // stages
    return RankParameters(
        dense,
        experts,
        ranks // tensor,
        max(1, ranks // (sizes["ep"] * sizes["etp"])),
        config.params_dtype.itemsize,
        shard,
    )
