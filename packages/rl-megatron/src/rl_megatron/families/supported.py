"""Models and layouts that rl-megatron does not train, judged only from fields of a config.

The driver calls `architecture_problems` with the fields of a local `config.json`, and the workers with all fields of
the `transformers` config. So a model that a worker would refuse is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.facts.hf_config import num_experts_of, rope_parameters
from rl_core.model_config import QWEN_WITH_IMAGES, ModelConfig, image_family_problems
from rl_megatron.config import KEY, MegatronConfig

Fields = Mapping[str, Any]
"""Fields of a language model's Hugging Face config; defaults may be missing."""

LINEAR_ATTENTION = "linear_attention"
"""Name of a layer without softmax attention among Hugging Face's `layer_types`."""

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""Names of a layer whose tokens see all tokens before them, and of one whose tokens see the next ones before them."""

GROUP_TOP = 2
"""Experts of a group whose summed scores rank it, in transformers."""

QUICK_GELU_ALPHA = 1.702
"""Gain of the sigmoid in the only activation of gpt-oss that Megatron has."""

GELU = "gelu_pytorch_tanh"
"""Activation of Gemma."""

SHARED_GATED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SIGMOID_ROUTED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies depend only on the config, not on the length of rows."""

LATENT_ROPE_TYPES = ("default", "yarn")
"""Types for multi-head latent attention, which makes its own rotary embedding."""

ROPE_TYPES_BY_KIND = ("default", "linear", "llama3")
"""Types for models whose kinds of layers rotate differently: Megatron scales the angles of all layers alike."""

WITH_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "idefics3", "smolvlm", "internvl")
"""Model types that train with images."""

ROTATED_BY_KIND = ("gemma3_text",)
"""Model types whose kinds of layers rotate differently."""

WHOLE_FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe_lite"),
    *("gpt_oss", "gemma3_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
)
"""Model types that rotate whole heads, whatever `partial_rotary_factor` is."""


def architecture_problems(fields: Fields, backend: MegatronConfig, family: Fields | None = None) -> Iterator[Problem]:
    """Yield the problems of a model, or of a layout that does not fit it, that rl-megatron does not train.

    Args:
        fields: Fields of the language model's Hugging Face config; nothing is yielded if they are empty.
        backend: Settings of the backend.
        family: Fields of Megatron's config that the model's family derives from them, if they are known.
    """
    if not fields:
        return
    kind = str(fields.get("model_type"))
    if kind in REFUSED:
        reason = f"is a {kind} model, which rl-megatron does not support: {REFUSED[kind]}"
        yield Problem("model_name", reason, remedy="Train with dtensor_cfg instead of megatron_cfg")
    for rule in RULES.get(kind, ()):
        if problem := rule(fields):
            yield problem
    if problem := rope_problem(fields):
        yield problem.at("model_name")
    if problem := fusion_problem(fields, backend.megatron_kwargs):
        yield problem
    overlap = "overlap_moe_expert_parallel_comm"
    if backend.megatron_kwargs.get(overlap) and fields.get("linear_num_key_heads"):
        reason = "needs layers of Megatron, but the linear attention of this model is another"
        yield Problem(f"{KEY}.megatron_kwargs.{overlap}", reason, remedy="Remove this key")
    # One size that does not fit is often the cause of the next problem.
    problems = [*_layout_problems(fields, backend, family), *_stage_problems(fields, backend)]
    yield from problems[:1]


def image_problems(model: ModelConfig, backend: MegatronConfig, fields: Fields) -> Iterator[Problem]:
    """Yield the settings that do not go with a model that sees images.

    Args:
        model: Config section of the model.
        backend: Settings of the backend.
        fields: Fields of the whole Hugging Face config; empty if it is not available.
    """
    yield from image_family_problems(model.vision, fields, WITH_IMAGES)
    if not model.vision.enabled:
        return
    for name in ("tower", "projector"):
        if getattr(model.vision, name) == "adapters":
            reason = "is not supported by rl-megatron, whose adapters are on Megatron's layers only"
            remedy = "Set frozen, or train with dtensor_cfg instead of megatron_cfg"
            yield Problem(f"vision.{name}", reason, got="adapters", remedy=remedy)
    if fields.get("model_type") in QWEN_WITH_IMAGES and backend.megatron_kwargs.get("apply_rope_fusion"):
        reason = "does not rotate tokens with three places each, as this model has them"
        yield Problem(f"{KEY}.megatron_kwargs.apply_rope_fusion", reason, remedy="Remove this key")
    if backend.fp8_cfg.enabled:
        reason = "has not been verified with vision.enabled=true"
        yield Problem(f"{KEY}.fp8_cfg.enabled", reason, got=True, remedy="Set it to false")


def refuse(problem: Problem | None) -> None:
    """Raise a problem in a worker.

    Raises:
        ValueError: With its key and message, unless it is None.
    """
    if problem is not None:
        raise ValueError(f"{problem.key}: {problem.message}")


def num_key_heads(fields: Fields) -> int:
    """Return the key-value heads that are spread over the tensor-parallel ranks; 0 for latent attention, or if it is
    not known."""
    return 0 if fields.get("kv_lora_rank") is not None else fields.get("num_key_value_heads") or 0


def rope_problem(fields: Fields) -> Problem | None:
    """Return the problem of a model whose rotary embedding rl-megatron does not compute; None if it does.

    Args:
        fields: The language model's Hugging Face config, in the names of transformers 5 or in older ones.
    """
    rope = rope_parameters(fields)
    kind = _rope_type(rope)
    is_latent = bool(fields.get("kv_lora_rank"))
    types = LATENT_ROPE_TYPES if is_latent else ROPE_TYPES
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    kinds = [_rope_type(rope[name]) for name in rotary_kinds(rope) if name is not None]
    others = sorted(set(kinds) - set(ROPE_TYPES_BY_KIND))
    if others:
        found, known = f"of type {others[0]!r} in one kind of layers", ", ".join(ROPE_TYPES_BY_KIND)
    elif kinds and fields.get("model_type") not in ROTATED_BY_KIND:
        found, known = "with parameters for each kind of layer", "the same parameters in all layers"
    elif kind not in types:
        found, known = f"of type {kind!r}", ", ".join(types)
    elif kind == "yarn" and is_latent and not rope.get("truncate", True):
        found, known = "of type 'yarn' with truncate=false", "truncate=true"
    elif kind == "yarn" and not (rope.get("factor") or 0) > 1:
        found, known = f"of type 'yarn' with factor={rope.get('factor')}", "factors above 1"
    elif kind != "default" and share not in (None, 1) and fields.get("model_type") in WHOLE_FAMILIES:
        # The family ignores the factor: transformers then has too few frequencies for its heads.
        found, known = f"of type {kind!r} with partial_rotary_factor", "whole heads of this type of model"
    else:
        return None
    return Problem(
        "",
        f"has a rotary embedding {found}, which rl-megatron does not support",
        allowed=known,
        remedy="Set rope_parameters in hf_config_overrides, or choose another backend: dtensor_cfg for training, vllm "
        "for generation",
    )


def rotary_kinds(rope: Mapping[str, Any]) -> list[str | None]:
    """Return the kinds of layers that have rotary parameters of their own, in order; None for all layers if they have
    the same.

    Args:
        rope: `rope_parameters` of a Hugging Face config.
    """
    kinds: list[str | None] = [*sorted(name for name, each in rope.items() if isinstance(each, Mapping))]
    return kinds or [None]


def fusion_problem(fields: Fields, megatron_kwargs: Mapping[str, Any]) -> Problem | None:
    """Return the problem of `megatron_kwargs.apply_rope_fusion` with a model that it does not fit; None if it does."""
    is_scaled = _rope_type(rope_parameters(fields)) == "yarn" and not fields.get("kv_lora_rank")
    if not is_scaled or not megatron_kwargs.get("apply_rope_fusion"):
        return None
    reason = "does not scale the cosines and sines of packed rows, which a rotary embedding of type 'yarn' needs"
    return Problem("megatron_cfg.megatron_kwargs.apply_rope_fusion", reason, remedy="Remove this key")


def activation_problem(fields: Fields) -> Problem | None:
    """Return the problem of another activation than SiLU; None if there is none, as for the functions below."""
    activation = fields.get("hidden_act") or "silu"
    return None if activation == "silu" else _unsupported(fields, f"hidden_act={activation}", "silu")


def bias_problem(fields: Fields) -> Problem | None:
    """Return the problem of biases of linear layers, which the families' weight maps do not have."""
    found = [name for name in ("attention_bias", "mlp_bias") if fields.get(name)]
    return _unsupported(fields, f"{' and '.join(found)}=true", "false") if found else None


def window_problem(fields: Fields) -> Problem | None:
    """Return the problem of layers with another kind of attention than full, sliding and linear."""
    known = (FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION)
    kinds = sorted(set(fields.get("layer_types") or []).difference(known))
    return _unsupported(fields, f"layers of type {', '.join(kinds)}", ", ".join(known)) if kinds else None


def without_bias_problem(fields: Fields) -> Problem | None:
    """Return the problem of attention without biases next to experts with biases: Megatron has one field for both."""
    return None if fields.get("attention_bias", True) else _unsupported(fields, "attention_bias=false", "true")


def activation_alpha_problem(fields: Fields) -> Problem | None:
    """Return the problem of another gain in the activation of gpt-oss than the one that Megatron has."""
    alpha = fields.get("swiglu_alpha", QUICK_GELU_ALPHA)
    return None if alpha == QUICK_GELU_ALPHA else _unsupported(fields, f"swiglu_alpha={alpha}", str(QUICK_GELU_ALPHA))


def gemma_problem(fields: Fields) -> Problem | None:
    """Return the problem of fields of Gemma that change the computation of its layers."""
    activation = fields.get("hidden_activation") or GELU
    if activation != GELU:
        return _unsupported(fields, f"hidden_activation={activation}", GELU)
    for name in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"):
        if value := fields.get(name):
            return _unsupported(fields, f"{name}={value}", "null")
    return None


def interleave_problem(fields: Fields) -> Problem | None:
    """Return the problem of rotary embeddings whose pairs of dims are not next to each other."""
    is_interleaved = fields.get("rope_interleave", True)
    return None if is_interleaved else _unsupported(fields, "rope_interleave=false", "true")


def group_problem(fields: Fields) -> Problem | None:
    """Return the problem of groups of experts that Megatron ranks differently from transformers."""
    experts, groups, chosen = (fields.get(name) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if not (experts and groups and chosen) or groups == chosen or experts // chosen == GROUP_TOP:
        return None
    return _unsupported(
        fields,
        f"num_experts_per_tok={experts} and topk_group={chosen}: Megatron ranks groups by their best "
        f"num_experts_per_tok / topk_group experts, transformers by their best {GROUP_TOP}",
        f"num_experts_per_tok / topk_group={GROUP_TOP}, or topk_group=n_group",
    )


def norm_problem(fields: Fields) -> Problem | None:
    """Return the problem of weights of the chosen experts that do not add up to one if, and only if, there are several
    of them, as in Megatron."""
    experts, normed = fields.get("num_experts_per_tok"), fields.get("norm_topk_prob", True)
    if not experts or normed == (experts > 1):
        return None
    cause = "Megatron normalises the weights of several experts, and not the weight of one"
    found = f"norm_topk_prob={normed} and num_experts_per_tok={experts}: {cause}"
    return _unsupported(fields, found, f"norm_topk_prob={experts > 1}")


def _unsupported(fields: Fields, found: str, allowed: str) -> Problem:
    reason = f"is a {fields.get('model_type')} model with {found}, which rl-megatron does not support"
    return Problem("model_name", reason, allowed=allowed, remedy="Train with dtensor_cfg instead of megatron_cfg")


def _rope_type(rope: Mapping[str, Any]) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    # Older configs call the embedding of tokens with three places a type of its own.
    return "default" if kind == "mrope" else kind


Rule = Callable[[Fields], Problem | None]

_GROUPED: tuple[Rule, ...] = (activation_problem, window_problem)
_DENSE: tuple[Rule, ...] = (bias_problem, *_GROUPED)
_SIGMOID: tuple[Rule, ...] = (group_problem, norm_problem)
RULES: Mapping[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _DENSE),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), _DENSE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral"), _DENSE),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite"), (bias_problem, activation_problem, interleave_problem, *_SIGMOID)
    ),
    "glm4_moe": (*_GROUPED, *_SIGMOID),
    "gpt_oss": (*_GROUPED, without_bias_problem, activation_alpha_problem),
    "gemma3_text": (*_DENSE, gemma_problem),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _DENSE),
}
"""Type of each model that this package has weight maps for, to the rules for flags that change the computation of its
layers in a way that Megatron's layers do not follow. Its family's settings call the same rules."""


REFUSED: Mapping[str, str] = {
    "nemotron_h": "the Mamba layers of megatron-core 0.16.1 run only on the CUDA kernels of mamba-ssm and "
    "causal-conv1d, so that no test can compare them with transformers"
}
"""Types of models that are refused, and the reason."""


def sizes_of(fields: Fields, family: Fields | None) -> tuple[Mapping[str, int], int, bool]:
    """Return the sizes that tensor-parallel ranks share by name, the experts of a layer (0 without experts), and
    whether routers have biases that balance experts.

    Args:
        fields: Fields of the model's Hugging Face config.
        family: Fields of Megatron's config that its family derives from them, if they are known.
    """
    kind = str(fields.get("model_type"))
    names = ["num_attention_heads", "intermediate_size"]
    if kind in LINEAR:
        names += ["linear_num_key_heads", "linear_num_value_heads"]
    shared = {name: fields[name] for name in names if fields.get(name)}
    if family is not None:
        size = family.get("moe_shared_expert_intermediate_size")
    elif kind in SIGMOID_ROUTED:
        size = (fields.get("moe_intermediate_size") or 0) * (fields.get("n_shared_experts") or 0)
    else:
        size = fields.get("shared_expert_intermediate_size") if kind in SHARED_GATED else 0
    if size:
        shared["shared expert size"] = size
    if family is None:
        return shared, num_experts_of(fields), kind in SIGMOID_ROUTED
    return shared, family.get("num_moe_experts") or 0, bool(family.get("moe_router_enable_expert_bias"))


def _layout_problems(fields: Fields, backend: MegatronConfig, family: Fields | None) -> Iterator[Problem]:
    kind = str(fields.get("model_type"))
    shared, num_experts, has_router_biases = sizes_of(fields, family)
    expert_size = fields.get("intermediate_size" if kind in ("mixtral", "gpt_oss") else "moe_intermediate_size") or 0
    tensor, expert = backend.tensor_model_parallel_size, backend.expert_model_parallel_size
    given = backend.expert_tensor_parallel_size
    expert_tensor_key = "tensor_model_parallel_size" if given is None else "expert_tensor_parallel_size"
    for name, size, shared_name, count in (
        *(("tensor_model_parallel_size", tensor, part, count) for part, count in shared.items()),
        ("expert_model_parallel_size", expert, "experts", num_experts),
        (expert_tensor_key, given or tensor, "expert size", expert_size if num_experts else 0),
    ):
        if count and count % size:
            reason = f"does not divide the model's {shared_name} ({count})"
            yield Problem(f"{KEY}.{name}", reason, got=size, remedy="Set it to a divisor")
    key, key_heads = f"{KEY}.tensor_model_parallel_size", num_key_heads(fields)
    if key_heads and key_heads % tensor and tensor % key_heads:
        reason = f"neither divides the model's num_key_value_heads ({key_heads}) nor is a multiple of it"
        yield Problem(key, reason, got=tensor, remedy="Set it to a divisor or a multiple")
    if not num_experts and expert > 1:
        reason = f"must be 1 because this model ({kind}) has no experts"
        yield Problem(f"{KEY}.expert_model_parallel_size", reason, got=expert, remedy="Set it to 1")
    if num_experts and tensor > 1 and not backend.sequence_parallel:
        cause = "each tensor-parallel rank then routes its own tokens"
        reason = f"above 1 for a mixture of experts needs sequence_parallel=true: {cause}"
        yield Problem(key, reason, got=tensor, remedy=f"Set {KEY}.sequence_parallel=true, or this key to 1")
    if kind == "gpt_oss" and (given or tensor) > 1:
        reason = "must be 1 for a gpt_oss model, because Megatron does not spread experts with biases over ranks"
        remedy = f"Set it to 1, and {KEY}.expert_model_parallel_size to 2 or more"
        yield Problem(f"{KEY}.expert_tensor_parallel_size", reason, got=given or tensor, remedy=remedy)
    if backend.moe_router_bias_update_rate and not has_router_biases:
        reason = f"has no effect: routers of {kind} models have no biases"
        yield Problem(f"{KEY}.moe_router_bias_update_rate", reason, remedy="Set it to 0")


def _stage_problems(fields: Fields, backend: MegatronConfig) -> Iterator[Problem]:
    num_layers = fields.get("num_hidden_layers") or 0
    if not num_layers or "pipeline_model_parallel_layout" in backend.megatron_kwargs:
        return
    key, ranks = f"{KEY}.pipeline_model_parallel_size", backend.pipeline_model_parallel_size
    virtual = backend.virtual_pipeline_model_parallel_size or 1
    if ranks * virtual > num_layers:
        sizes = "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size"
        reason = f"results in {ranks * virtual} pipeline stages ({sizes}), but the model has only {num_layers} layers"
        yield Problem(key, reason, got=ranks, remedy=f"Use at most {num_layers} stages")
        return
    ends = (backend.num_layers_in_first_pipeline_stage, backend.num_layers_in_last_pipeline_stage)
    given = [layers for layers in ends if layers is not None]
    left, others = num_layers - sum(given), ranks - len(given)
    chunks = others * virtual
    if (others <= 0 and left) or (others > 0 and (left < chunks or left % chunks)):
        yield Problem(
            key,
            f"leaves {left} of the model's {num_layers} layers that cannot be spread evenly over {others} pipeline "
            f"ranks in {chunks} parts",
            got=ranks,
            remedy=f"Set {KEY}.num_layers_in_first_pipeline_stage or {KEY}.num_layers_in_last_pipeline_stage",
        )
