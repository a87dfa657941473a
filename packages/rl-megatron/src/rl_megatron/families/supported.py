"""Models and layouts that rl-megatron does not train, judged only from fields of a config.

The driver calls `architecture_problems` with the fields of a local `config.json`, and the workers with all fields of
the `transformers` config. So what a worker would refuse is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.config import Problem
from rl_core.model_config import num_experts_of
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.families.rope import fusion_problem, rope_problem

Fields = Mapping[str, Any]
"""Fields of a language model's Hugging Face config; defaults may be missing."""

LINEAR_ATTENTION = "linear_attention"
"""Name of a layer without softmax attention among Hugging Face's `layer_types`."""

GROUP_TOP = 2
"""Experts of a group whose summed scores rank it, in transformers."""

SHARED_GATED = ("qwen2_moe", "qwen3_next")
SIGMOID_ROUTED = ("deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model that its layout must fit.

    Args:
        kind: Type of the model.
        shared: Name to each size that tensor-parallel ranks share.
        key_heads: Key-value heads that tensor-parallel ranks share or repeat; 0 for latent attention, or if unknown.
        num_experts: Experts of a layer; 0 without experts.
        expert_size: Size of an expert's intermediate states; 0 if unknown.
        has_router_biases: True if routers have biases that balance experts.
        num_layers: Number of layers; 0 if unknown.
    """

    kind: str
    shared: Mapping[str, int]
    key_heads: int
    num_experts: int
    expert_size: int
    has_router_biases: bool
    num_layers: int

    @classmethod
    def of(cls, fields: Fields, family: Fields | None = None) -> Sizes:
        """Read the sizes of a model.

        Args:
            fields: Fields of its Hugging Face config.
            family: Fields of Megatron's config that its family derives from them, if they are known.
        """
        kind = str(fields.get("model_type"))
        names = ["num_attention_heads", "intermediate_size"]
        if kind == "qwen3_next":
            names += ["linear_num_key_heads", "linear_num_value_heads"]
        shared = {name: fields[name] for name in names if fields.get(name)}
        if size := _shared_expert_size(fields) if family is None else family.get("moe_shared_expert_intermediate_size"):
            shared["shared expert size"] = size
        expert_size = fields.get("intermediate_size" if kind == "mixtral" else "moe_intermediate_size") or 0
        return cls(
            kind,
            shared,
            num_key_heads(fields),
            num_experts_of(fields) if family is None else family.get("num_moe_experts") or 0,
            expert_size,
            kind in SIGMOID_ROUTED if family is None else bool(family.get("moe_router_enable_expert_bias")),
            fields.get("num_hidden_layers") or 0,
        )


def _shared_expert_size(fields: Fields) -> int:
    kind = fields.get("model_type")
    if kind in SIGMOID_ROUTED:
        return (fields.get("moe_intermediate_size") or 0) * (fields.get("n_shared_experts") or 0)
    return (fields.get("shared_expert_intermediate_size") or 0) if kind in SHARED_GATED else 0


def num_key_heads(fields: Fields) -> int:
    """Return the key-value heads that are spread over the tensor-parallel ranks; 0 for latent attention, or if it is
    not known."""
    return 0 if fields.get("kv_lora_rank") is not None else fields.get("num_key_value_heads") or 0


def architecture_problems(fields: Fields, backend: MegatronConfig, family: Fields | None = None) -> Iterator[Problem]:
    """Yield what rl-megatron does not train: a model, or a layout that does not fit it.

    Args:
        fields: Fields of the language model's Hugging Face config; nothing is yielded if they are empty.
        backend: Settings of the backend.
        family: Fields of Megatron's config that the model's family derives from them, if they are known.
    """
    if not fields:
        return
    yield from _family_problems(fields)
    if problem := rope_problem(fields):
        yield problem.at("model_name")
    if problem := fusion_problem(fields, backend.megatron_kwargs):
        yield problem
    # one size that does not fit is often the cause of the next problem
    yield from list(_layout_problems(Sizes.of(fields, family), backend))[:1]


def refuse(problem: Problem | None) -> None:
    """Raise a problem in a worker.

    Raises:
        ValueError: With its key and message, unless it is None.
    """
    if problem is not None:
        raise ValueError(f"{problem.key}: {problem.message}")


def activation_problem(fields: Fields) -> Problem | None:
    """Return the problem of another activation than SiLU; None if there is none, as for the functions below."""
    activation = fields.get("hidden_act") or "silu"
    return None if activation == "silu" else _unsupported(fields, f"hidden_act={activation}", "silu")


def bias_problem(fields: Fields) -> Problem | None:
    """Return the problem of biases of linear layers, which the families' weight maps do not have."""
    found = [name for name in ("attention_bias", "mlp_bias") if fields.get(name)]
    return _unsupported(fields, f"{' and '.join(found)}=true", "false") if found else None


def window_problem(fields: Fields) -> Problem | None:
    """Return the problem of layers of softmax attention that do not all see the same tokens."""
    kinds = sorted(set(fields.get("layer_types") or []) - {LINEAR_ATTENTION})
    reason = f"layers that differ in attention ({', '.join(kinds)})"
    return _unsupported(fields, reason, "one kind of attention in all layers") if len(kinds) > 1 else None


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
    of them, as Megatron's do."""
    experts, normed = fields.get("num_experts_per_tok"), fields.get("norm_topk_prob", True)
    if not experts or normed == (experts > 1):
        return None
    return _unsupported(
        fields,
        f"norm_topk_prob={normed} and num_experts_per_tok={experts}: Megatron normalises the weights of several "
        "experts, and not the weight of one",
        f"norm_topk_prob={experts > 1}",
    )


def _unsupported(fields: Fields, found: str, allowed: str) -> Problem:
    return Problem(
        "model_name",
        f"is a {fields.get('model_type')} model with {found}, which rl-megatron does not support",
        allowed=allowed,
        remedy="Train with dtensor_cfg instead of megatron_cfg",
    )


Rule = Callable[[Fields], Problem | None]

_GROUPED: tuple[Rule, ...] = (activation_problem, window_problem)
_DENSE: tuple[Rule, ...] = (bias_problem, *_GROUPED)
_SIGMOID: tuple[Rule, ...] = (group_problem, norm_problem)
RULES: Mapping[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _DENSE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral"), _DENSE),
    "deepseek_v3": (bias_problem, activation_problem, interleave_problem, *_SIGMOID),
    "glm4_moe": (*_GROUPED, *_SIGMOID),
}
"""Type of each model that this package has weight maps for, to the rules that its family's settings ask."""


def _family_problems(fields: Fields) -> Iterator[Problem]:
    """Yield the flags of a config that change what the layers of its family compute, and Megatron's layers do not."""
    found = [rule(fields) for rule in RULES.get(str(fields.get("model_type")), ())]
    yield from (problem for problem in found if problem is not None)


def _layout_problems(sizes: Sizes, backend: MegatronConfig) -> Iterator[Problem]:
    tensor, expert = backend.tensor_model_parallel_size, backend.expert_model_parallel_size
    expert_tensor = backend.expert_tensor_parallel_size or tensor
    num_experts = sizes.num_experts
    for name, size, what, count in (
        *(("tensor_model_parallel_size", tensor, part, count) for part, count in sizes.shared.items()),
        ("expert_model_parallel_size", expert, "experts", num_experts),
        (_expert_tensor_key(backend), expert_tensor, "expert size", sizes.expert_size if num_experts else 0),
    ):
        if count and count % size:
            yield Problem(f"{KEY}.{name}", f"does not divide the model's {what} ({count})", got=size, remedy=DIVISOR)
    if sizes.key_heads and sizes.key_heads % tensor and tensor % sizes.key_heads:
        yield key_heads_problem(tensor, sizes.key_heads)
    if not num_experts and expert > 1:
        reason = f"must be 1 because this model ({sizes.kind}) has no experts"
        yield Problem(f"{KEY}.expert_model_parallel_size", reason, got=expert, remedy="Set it to 1")
    if num_experts and tensor > 1 and not backend.sequence_parallel:
        yield Problem(
            f"{KEY}.tensor_model_parallel_size",
            "above 1 for a mixture of experts needs sequence_parallel=true: each tensor-parallel rank then routes its "
            "own tokens",
            got=tensor,
            remedy=f"Set {KEY}.sequence_parallel=true, or this key to 1",
        )
    if backend.moe_router_bias_update_rate and not sizes.has_router_biases:
        reason = f"has no effect: routers of {sizes.kind} models have no biases"
        yield Problem(f"{KEY}.moe_router_bias_update_rate", reason, remedy="Set it to 0")
    yield from _stage_problems(sizes.num_layers, backend)


DIVISOR = "Set it to a divisor"


def _expert_tensor_key(backend: MegatronConfig) -> str:
    given = backend.expert_tensor_parallel_size
    return "tensor_model_parallel_size" if given is None else "expert_tensor_parallel_size"


def key_heads_problem(size: int, num_heads: int) -> Problem:
    """Return the problem of a number of tensor-parallel ranks that does not fit the model's key-value heads."""
    return Problem(
        f"{KEY}.tensor_model_parallel_size",
        f"neither divides the model's num_key_value_heads ({num_heads}) nor is a multiple of it",
        got=size,
        remedy="Set it to a divisor or a multiple",
    )


def _stage_problems(num_layers: int, backend: MegatronConfig) -> Iterator[Problem]:
    if not num_layers or "pipeline_model_parallel_layout" in backend.megatron_kwargs:
        return
    key, ranks = f"{KEY}.pipeline_model_parallel_size", backend.pipeline_model_parallel_size
    virtual = backend.virtual_pipeline_model_parallel_size or 1
    if ranks * virtual > num_layers:
        yield Problem(
            key,
            f"results in {ranks * virtual} pipeline stages (pipeline_model_parallel_size x "
            f"virtual_pipeline_model_parallel_size), but the model has only {num_layers} layers",
            got=ranks,
            remedy=f"Use at most {num_layers} stages",
        )
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
