"""The activations that the backward pass computes again, as fields of Megatron's config.

The choice follows from the memory and the products of each layer: formulas for the layers of megatron-core 0.16.1. It
is made when memory is measured, at the first training step, while layers decide when they are built whether they can
recompute parts of themselves. They are built so that they can, and stop doing so if the choice is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from torch import nn
from transformers import PreTrainedConfig

from rl_core.facts.model_size import ModelSize, size_of_fields, trained_size
from rl_core.facts.vision_size import VisionSize
from rl_core.model_config import ModelConfig
from rl_core.torch.training.memory import StepPlan
from rl_core.torch.training.recompute import (
    ActivationMemory,
    ActivationsUnknown,
    LayerActivations,
    RecomputePlan,
    image_bytes,
    log_unknown,
    logit_bytes,
    max_tokens,
    passes_kept,
)
from rl_megatron.config import MegatronConfig
from rl_megatron.conversion.splits import padded_vocab
from rl_megatron.parallel.mesh import MegatronMesh
from rl_megatron.rank_memory import RankPart, rank_memory
from rl_megatron.transformer_fields import RECOMPUTED_WITH_TE

REST = "rest"
"""The part of a layer that no key of selective recomputation covers."""
WITHIN = {"moe": ("moe_act", "shared_experts")}
"""Parts that are recomputed together with another part."""
SWITCHES = (
    "activation_recompute",
    "checkpoint_core_attention",
    "moe_layer_recompute",
    "recompute_input_layernorm",
    "recompute_mlp",
    "recompute_pre_mlp_layernorm",
    "recompute_up_proj",
    "shared_experts_recompute",
)
"""Attributes of Megatron's modules that are true if a part of them is recomputed selectively."""
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Fields that recompute every layer as a whole."""
_WIDE = torch.float32.itemsize


class Part(NamedTuple):
    """A part of a layer, for one token on one rank.

    Args:
        kept: Bytes that stay for the backward pass and do not if the part is recomputed.
        products: Multiplications in its matrix products.
        weights: Parameters of these products, except in experts.
        expert_weights: Parameters of experts.
    """

    kept: float = 0.0
    products: float = 0.0
    weights: float = 0.0
    expert_weights: float = 0.0

    @classmethod
    def linear(cls, kept: float, weights: float) -> Part:
        """Return a part whose weights the token meets once each."""
        return cls(kept, weights, weights)

    @classmethod
    def total(cls, parts: Iterable[Part]) -> Part:
        """Return several parts together."""
        return cls(*(sum(numbers) for numbers in zip(*parts, strict=True)))


class LayerShapes:
    """Shapes of a model's layers.

    A formula counts the tensors that autograd and the layers of Transformer Engine keep: inputs of matrix products, of
    norms and of activations, and queries, keys, values and results of flash attention. Tokens are assumed to be spread
    evenly over experts. Layers without Transformer Engine also keep the intermediate results of unfused operations.

    Args:
        config: Megatron's config of the model and the layout.
        has_te: True if the layers are Transformer Engine's.
        longest: Maximum length of a row, which determines the products of attention scores.
    """

    def __init__(self, config: TransformerConfig, *, has_te: bool, longest: int) -> None:
        # Fields that the check of the family's config left open are numbers here.
        self._config: Any = config
        self._has_te = has_te
        self._longest = longest
        self._item = config.params_dtype.itemsize
        self._tensor = config.tensor_model_parallel_size
        self._tokens = self._tensor if config.sequence_parallel else 1  # Ranks that share tokens between blocks.
        self._between = config.hidden_size * self._item / self._tokens

    def layers(self) -> list[Mapping[str, Part]]:
        """Return the parts of each layer of the model by their names in `recompute_modules`, and `REST`.

        Raises:
            ActivationsUnknown: If the model has layers without a formula.
        """
        if self._config.linear_attention_freq is not None:
            raise ActivationsUnknown("there is no formula for linear attention")
        if self._config.activation_func is not F.silu:
            raise ActivationsUnknown("there are formulas only for layers with SwiGLU")
        pattern = self._config.moe_layer_freq
        if not isinstance(pattern, list):
            pattern = [number % pattern == 0 for number in range(self._config.num_layers)]
        found: list[Mapping[str, Part]] = []
        for each in pattern:
            attention = self._latent_attention() if self._config.multi_latent_attention else self._attention()
            has_experts = self._config.num_moe_experts is not None and bool(each)
            rest = self._experts() if has_experts else self._dense()
            names = dict.fromkeys([*attention, *rest])
            found.append({name: Part.total(half[name] for half in (attention, rest) if name in half) for name in names})
        return found

    def activations(self, layer: Mapping[str, Part], modules: Iterable[str]) -> LayerActivations:
        """Return the bytes that a layer keeps, if these parts are the ones that selective recomputation covers."""
        kept = Part.total(layer.values()).kept
        again = Part.total(_covered(layer, modules)).kept
        return LayerActivations(round(kept), round(kept - again), round(self._between))

    def _norm(self, width: float) -> float:
        """Return the bytes that a norm keeps in addition to its input and its output."""
        # The normalised input; in half precision also the input in float32, which is kept in place of the input.
        return 0.0 if self._has_te else width * _WIDE

    def _block_norm(self, *, is_separate: bool) -> dict[str, Part]:
        """Return the norm before a block, with its input and its output.

        Args:
            is_separate: True if it is a separate module also among layers of Transformer Engine.
        """
        hidden = self._config.hidden_size / self._tokens
        kept = {REST: Part(self._between + self._norm(hidden))}
        if is_separate or not self._has_te:
            return {**kept, "layernorm": Part(self._between)}
        return {REST: Part(2 * self._between)}

    def _attention(self) -> dict[str, Part]:
        config = self._config
        queries = config.num_attention_heads * config.kv_channels / self._tensor
        keys = max(config.num_query_groups, self._tensor) * config.kv_channels / self._tensor
        projected = queries + 2 * keys + (queries if config.attention_output_gate else 0)
        kept = (projected + queries + keys) * self._item  # Before and after rotation; values are not copied.
        if config.qk_layernorm:
            kept += (queries + keys) * self._item + self._norm(queries + keys)
        norms = self._block_norm(is_separate=False)
        kept += self._rotation(config.kv_channels) + queries * self._item
        linear = Part.linear(kept, config.hidden_size * (projected + queries))
        rest = Part.total((norms[REST], linear))
        return {**norms, REST: rest, "core_attn": self._scores(queries, keys, queries + keys)}

    def _latent_attention(self) -> dict[str, Part]:
        config = self._config
        heads, rotary = config.num_attention_heads / self._tensor, config.qk_pos_emb_head_dim
        per_query, per_value = config.qk_head_dim + rotary, config.v_head_dim
        low = (config.q_lora_rank or 0) + config.kv_lora_rank
        up = heads * (per_query + config.qk_head_dim + per_value)
        norms = self._block_norm(is_separate=True)
        # Each norm between the two projections has its input and its output.
        kept = (2 * low * self._item + self._norm(low)) / self._tokens
        out = heads * per_value
        weights = config.hidden_size * (low + rotary + out)
        if config.q_lora_rank is None:
            weights += config.hidden_size * heads * per_query
        up_weights = (config.q_lora_rank or 0) * heads * per_query
        up_weights += config.kv_lora_rank * heads * (config.qk_head_dim + per_value)
        # The projected tensors come first, then queries and keys with their rotated parts, and values.
        projected = (up + 2 * heads * per_query + out) * self._item
        return {
            **norms,
            REST: Part.total((norms[REST], Part.linear(kept + out * self._item, weights))),
            "mla_up_proj": Part.linear(projected + self._rotation(rotary), up_weights),
            "core_attn": self._scores(out, heads * per_query, heads * (per_query + per_value)),
        }

    def _rotation(self, width: float) -> float:
        """Return the bytes of the cosines and sines that rotating queries and keys keeps, unless one kernel does it."""
        return 0.0 if self._config.apply_rope_fusion else 4 * width * self._item

    def _scores(self, out: float, keys: float, sums: float) -> Part:
        """Return attention itself, whose inputs and output are counted in the parts that make them.

        Args:
            out: Width of its output.
            keys: Width of keys.
            sums: Widths that scores and their products with values go over, together.
        """
        config = self._config
        kept = _WIDE * config.num_attention_heads / self._tensor
        if not self._has_te:
            # Rows are attended one by one and joined, and context-parallel ranks gather keys and values.
            context = config.context_parallel_size
            kept += (out + (2 * context * keys if context > 1 else 0)) * self._item
        return Part(kept, sums * self._longest / 2)  # Half of the scores are masked.

    def _dense(self) -> dict[str, Part]:
        config = self._config
        norms = self._block_norm(is_separate=False)
        inner = config.ffn_hidden_size / self._tensor
        kept = self._gated(inner)
        if self._has_te:
            # The norm is a part of the first product.
            norms = {REST: Part(self._between)}
            kept += self._between
        return {**norms, "mlp": Part.linear(kept, 3 * config.hidden_size * inner)}

    def _experts(self) -> dict[str, Part]:
        config = self._config
        expert_tensor = config.expert_tensor_parallel_size or self._tensor
        copies = config.moe_router_topk * expert_tensor / self._tokens
        inner = config.moe_ffn_hidden_size / expert_tensor
        activated = copies * inner * self._item
        # Logits, scores and probabilities are float32; the map of tokens to experts has one byte each.
        routing = config.num_moe_experts * (3 * _WIDE + 1) / self._tokens
        kept = routing + copies * config.hidden_size * self._item + copies * self._gated(inner, is_weighted=True)
        router, expert = config.hidden_size * config.num_moe_experts, 3 * config.hidden_size * inner
        num_experts = config.num_moe_experts / config.expert_model_parallel_size
        parts = {
            **self._block_norm(is_separate=True),
            "moe": Part(kept - activated, copies * expert + router / self._tokens, router, num_experts * expert),
            "moe_act": Part(activated),
        }
        shared = config.moe_shared_expert_intermediate_size
        if shared is not None:
            inner = shared / self._tensor
            parts["shared_experts"] = Part.linear(self._gated(inner), 3 * config.hidden_size * inner)
        return parts

    def _gated(self, inner: float, *, is_weighted: bool = False) -> float:
        """Return the bytes between the two products of a gated block: both halves, and what the second product takes.
        Operations that are not fused also keep the activated half, and the other one with a constant added.

        Args:
            inner: Width of each half.
            is_weighted: True if the activation is multiplied by the weight of an expert.
        """
        config = self._config
        is_fused = config.bias_activation_fusion or config.use_te_activation_func
        return inner * self._item * (3 if is_fused else 5 + is_weighted)


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank's training step, and the plans that Megatron can run.

    Args:
        choice: `megatron_cfg.recompute`.
        plans: Plans for the layers of the rank, in order of preference; one if the settings fix it.
        chunks: Number of runs of layers of the rank.
        parts: Bytes by name of everything except activations.
        activations: Activations of the layers; None if they cannot be counted.
    """

    choice: str
    plans: Sequence[RecomputePlan]
    chunks: int
    parts: Mapping[str, int]
    activations: ActivationMemory | None

    def plan(self, room: int) -> tuple[RecomputePlan, StepPlan]:
        """Choose the plan for this many bytes; return the one of each run of layers, and its bytes with the others."""
        decision = f"megatron_cfg.recompute={self.choice}"
        if self.activations is None:
            return self.plans[0].of_chunks(self.chunks), StepPlan(decision, self.parts)
        plan = self.activations.choose(self.plans, room - sum(self.parts.values()))
        parts = {**self.parts, "activations": self.activations.size(plan)}
        return plan.of_chunks(self.chunks), StepPlan(f"{decision}: {self.activations.in_words(plan)}", parts)


def put_into_effect(plan: RecomputePlan, chunks: Iterable[nn.Module], config: Any) -> None:
    """Change layers that were built to recompute parts of themselves so that they recompute what the plan has.

    Args:
        plan: Plan for each run of layers.
        chunks: The runs.
        config: Config of Megatron that the chunks share, changed in place.
    """
    if plan.num_selective:
        return
    config.recompute_granularity = None
    if plan.num_full:
        fields = ("full", "block", plan.num_full)
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = fields
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name in SWITCHES:
            if vars(module).get(name):
                setattr(module, name, False)


def recompute_fields(
    config: ModelConfig,
    backend: MegatronConfig,
    hf: PreTrainedConfig,
    shape: TransformerConfig,
    *,
    mesh: MegatronMesh,
    has_te: bool,
    trains: bool,
    whole: PreTrainedConfig | None = None,
) -> tuple[dict[str, Any], StageMemory | None]:
    """Return the fields of Megatron's config for what is recomputed, and the memory that decides on it later.

    Both are the same on every rank. If memory decides, the fields are those of selective recomputation.

    Args:
        config: Config of the model, whose microbatches decide how many activations there are.
        backend: Settings of this backend.
        hf: Hugging Face config of the language model.
        shape: Config of Megatron, without these fields.
        mesh: Mesh of the run.
        has_te: True if the layers are Transformer Engine's.
        trains: False for a model that never runs backwards.
        whole: Hugging Face config of the whole model; None without images.

    Returns:
        The fields, and the memory; None if the model does not train or the device has no memory of its own.

    Raises:
        ValueError: If parts are to be recomputed that these layers do not support.
    """
    choice = backend.recompute if trains else "none"
    is_measured = trains and mesh.kind.memory() is not None
    if choice == "none" and not is_measured:
        return {}, None
    if choice == "full" and not is_measured:
        return WHOLE, None
    modules = recomputed_modules(backend, shape, has_te=has_te)
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    fixed_fields: dict[str, dict[str, Any]] = {"none": {}, "full": WHOLE, "selective": selective}
    fields = fixed_fields.get(choice)
    if not is_measured:
        return fields or {}, None
    chunks, num_layers, sizes = shape.virtual_pipeline_model_parallel_size or 1, layers_per_rank(shape), mesh.layout
    fixed = {"none": RecomputePlan(), "selective": RecomputePlan(num_selective=num_layers)}
    plans = [fixed.get(choice, RecomputePlan(num_full=num_layers))]
    activations, parts = None, {}
    try:
        shapes = LayerShapes(shape, has_te=has_te, longest=config.max_total_sequence_length)
        held = shapes.layers()[-num_layers:]
    except ActivationsUnknown as problem:
        if mesh.rank == 0:
            log_unknown(problem)
        fields = WHOLE if fields is None else fields
    else:
        kept = [shapes.activations(layer, modules) for layer in held]
        images = image_bytes(config, whole or hf, recomputes_tower=False)
        activations = ActivationMemory(kept, max_tokens(config, sizes["cp"]), passes_kept(sizes["pp"], chunks), images)
        parts = state_parts(config, backend, hf, shape, held, mesh, whole=whole)
        if fields is None:
            fields, plans = selective, plans_of(held, modules)
    parts["logits"] = logit_bytes(config, padded_vocab(hf.vocab_size, sizes["tp"]) // sizes["tp"])
    return fields, StageMemory(choice, plans, chunks, parts, activations)


def state_parts(
    config: ModelConfig,
    backend: MegatronConfig,
    hf: PreTrainedConfig,
    shape: TransformerConfig,
    held: Sequence[Mapping[str, Part]],
    mesh: MegatronMesh,
    *,
    whole: PreTrainedConfig | None = None,
) -> dict[str, int]:
    """Return the bytes by name of the weights, gradients and optimizer state of a rank that has the last layers and
    the vision tower.

    Args:
        config: Config of the model.
        backend: Settings of this backend.
        hf: Hugging Face config of the language model.
        shape: Config of Megatron.
        held: Layers of the rank.
        mesh: Mesh of the run.
        whole: Hugging Face config of the whole model; None without images.
    """
    sizes, itemsize = mesh.layout, shape.params_dtype.itemsize
    fields = hf.to_dict()
    vision = VisionSize.of(whole.to_dict()) if whole is not None else None
    seeing, training = (0, []) if vision is None else (vision.parameters(), vision.training(config.vision))
    model = replace(size_of_fields(fields) or ModelSize(1, 1, 1, 1), vision=seeing)
    trained = ModelSize(0) if config.lora_cfg.enabled else trained_size(config, fields, model, training)

    def share(*kinds: str) -> float:
        """Return the share of the parameters of some kinds that trains, in the whole model."""
        count, trains = (sum(getattr(each, kind) for kind in kinds) for each in (model, trained))
        return trains / count if count else 0.0

    ends, layers, experts = rank_parameters(hf, shape, held, mesh)
    ranks = sizes["world"] // sizes["pp"]
    copies, expert_copies = ranks // sizes["tp"], max(1, ranks // (sizes["ep"] * sizes["etp"]))
    parts = [
        RankPart(layers, layers * share("layers"), copies, is_matrix=True),
        RankPart(ends, ends * share("embedding", "head"), copies, is_matrix=False),
        RankPart(experts, experts * share("experts"), expert_copies, is_matrix=True),
        RankPart(seeing, seeing * share("vision"), copies, is_matrix=True),
    ]
    state = rank_memory(config, backend, parts, itemsize)
    weights = (ends + layers + experts + seeing) * itemsize
    found = {"weights": weights, "gradients": state.device - state.kept, "optimizer state": state.kept - weights}
    return {name: round(size) for name, size in found.items() if size}


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
    has = {
        "core_attn": True,
        "layernorm": has_experts or config.multi_latent_attention,
        "mla_up_proj": config.multi_latent_attention,
        "mlp": has_dense,
        "moe": has_experts,
        "moe_act": has_experts,
        "shared_experts": config.moe_shared_expert_intermediate_size is not None,
    }
    return {name for name, is_part in has.items() if is_part}


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


def plans_of(layers: Sequence[Mapping[str, Part]], modules: Sequence[str]) -> list[RecomputePlan]:
    """Return the plans that Megatron can run, from the one with the fewest recomputed products to the one with most.

    Megatron recomputes either parts of all layers, or some layers as a whole.

    Args:
        layers: Layers of a rank.
        modules: Parts that selective recomputation covers.
    """
    products = [Part.total(layer.values()).products for layer in layers]
    covered = sum(Part.total(_covered(layer, modules)).products for layer in layers)
    costs = {RecomputePlan(): 0.0, RecomputePlan(num_selective=len(layers)): covered}
    for number in range(1, len(layers) + 1):
        costs[RecomputePlan(num_full=number)] = sum(products[:number])
    return sorted(costs, key=lambda plan: (costs[plan], plan.num_full))


def _covered(layer: Mapping[str, Part], modules: Iterable[str]) -> list[Part]:
    """Return the parts of a layer that are recomputed with these modules."""
    names = {inner for name in modules for inner in (name, *WITHIN.get(name, ()))}
    return [part for name, part in layer.items() if name in names]


def rank_parameters(
    hf: PreTrainedConfig, config: TransformerConfig, layers: Sequence[Mapping[str, Part]], mesh: MegatronMesh
) -> tuple[float, float, float]:
    """Return the numbers of parameters of the last pipeline rank: at the ends of the model, in layers outside of
    experts, and in experts.

    Args:
        hf: Hugging Face config of the model.
        config: Config of Megatron.
        layers: Layers of that rank.
        mesh: Mesh of the run.
    """
    tensor, stages = mesh.layout["tp"], mesh.layout["pp"]
    has_both_ends = stages == 1 and not hf.tie_word_embeddings
    shard = padded_vocab(hf.vocab_size, tensor) // tensor
    whole = Part.total(Part.total(layer.values()) for layer in layers)
    return shard * config.hidden_size * (2 if has_both_ends else 1), whole.weights, whole.expert_weights
