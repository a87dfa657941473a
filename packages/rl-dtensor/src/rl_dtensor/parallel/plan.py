"""Splits of the modules of a model over tensor-parallel ranks.

A plan has the style of a module by its name, with `*` for the number of a layer, or of a parameter that a module holds
itself, which may be `colwise` (the sinks of attention, one per head):

- `colwise`: a linear layer whose outputs are split (query, key, value, gate, up). Its parent is a *block*: the inputs
  of the block are whole on every rank, and everything inside works on a part of them.
- `rowwise`: a linear layer whose inputs are split (output, down); its results are summed over the ranks and leave the
  block.
- `colwise_gather_output`, `rowwise_split_input`: as the two above, but whole tensors go in and come out of each. The
  code between them is not split: it cuts fused projections apart, or norms all heads at once. Their parent is a *whole
  block*: every rank computes all of it, except these products.
- `whole`: a whole block without such products. Parts of layers that compute across tokens are whole, unless the plan
  contains something in them: every rank computes them for all tokens.
- `replicated`: a module inside a block that every rank has whole (the norms of queries and keys).
- `experts`: a module of stacked experts, split by expert. Every rank passes all tokens through its own; the router and
  shared experts next to it are outside.
- `embedding`, `head`: split by vocabulary.

Every rank has all other modules whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from rl_dtensor.config import Style
from rl_dtensor.parallel.body import body_name
from rl_dtensor.parallel.experts import expert_modules, takes_choices

_ATTENTION: dict[str, Style] = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    "layers.*.self_attn.o_proj": "rowwise",
}
_QUERY_KEY_NORMS: dict[str, Style] = {f"layers.*.self_attn.{name}_norm": "replicated" for name in ("q", "k")}
_MLP: dict[str, Style] = {
    **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "layers.*.mlp.down_proj": "rowwise",
}
_FEED_FORWARD: dict[str, Style] = {name.replace("mlp", "feed_forward"): style for name, style in _MLP.items()}
_LFM2: dict[str, Style] = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    "layers.*.self_attn.out_proj": "rowwise",
    **{f"layers.*.self_attn.{name}_layernorm": "replicated" for name in ("q", "k")},
    **{f"layers.*.feed_forward.{name}": "colwise" for name in ("w1", "w3")},
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.feed_forward.experts": "experts",
}

PLANS: Mapping[str, Mapping[str, Style]] = {
    "llama": {**_ATTENTION, **_MLP},
    "mistral": {**_ATTENTION, **_MLP},
    "qwen2": {**_ATTENTION, **_MLP},
    "qwen3": {**_ATTENTION, **_QUERY_KEY_NORMS, **_MLP},
    "gemma3_text": {**_ATTENTION, **_QUERY_KEY_NORMS, **_MLP},
    "gemma3n_text": {
        **_ATTENTION,
        **_QUERY_KEY_NORMS,
        # Its activation takes the mean and the spread of all features of a token.
        **{f"layers.*.mlp.{name}_proj": "colwise_gather_output" for name in ("gate", "up")},
        "layers.*.mlp.down_proj": "rowwise_split_input",
    },
    "nemotron_h": {
        **{f"layers.*.mixer.{name}_proj": "colwise" for name in ("q", "k", "v", "up")},
        **{f"layers.*.mixer.{name}_proj": "rowwise" for name in ("o", "down")},
        "layers.*.mixer.shared_experts.up_proj": "colwise",
        "layers.*.mixer.shared_experts.down_proj": "rowwise",
        "layers.*.mixer.experts": "experts",
    },
    "bamba": {**_ATTENTION, **_FEED_FORWARD},
    "jamba": {**_ATTENTION, **_FEED_FORWARD, "layers.*.feed_forward.experts": "experts"},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "gpt_oss": {**_ATTENTION, "layers.*.self_attn.sinks": "colwise", "layers.*.mlp.experts": "experts"},
}
"""Model type to the plan of its layers, below the base model's prefix."""

NAMED = ((("q_proj", "k_proj", "v_proj"), "o_proj"), (("gate_proj", "up_proj"), "down_proj"))
"""Names of linear layers whose outputs are split, and of the layer next to them whose inputs are split, in families
without a plan."""

STYLES_OF_TRANSFORMERS: Mapping[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
    "mla_kv_a_proj": "replicated",
    "moe_tp_experts": "experts",
}
"""Words of the plans in `transformers` that mean the same. Parameters of stacked experts are listed there too; here
they follow from `experts`."""

EXPERT_PARAMETERS = ("packed_colwise", "grouped_gemm")
VOCABULARY = "embedding_rowwise"
"""Word for the embedding, which is always split by vocabulary here."""


def plan_of(hf: PreTrainedModel, custom: Mapping[str, Style] | None, layers: Sequence[nn.Module]) -> dict[str, Style]:
    """Return the style of every split module and parameter by its name, from the custom plan, or this backend's plan
    for the family, or the model's own, or the usual layers.

    Args:
        hf: Whole model.
        custom: Style by a pattern of module or parameter name, from `dtensor_cfg.custom_parallel_plan`; None if not
            set.
        layers: Repeated layers of the model.

    Raises:
        ValueError: If there is no plan, or it has a module that the model lacks or a split that is not supported here.
    """
    names_of = {id(module): name for name, module in hf.named_modules()}
    patterns: dict[str, Style] = {}
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if isinstance(embedding, nn.Embedding):
        patterns[names_of[id(embedding)]] = "embedding"
    if isinstance(head, nn.Linear):
        patterns[names_of[id(head)]] = "head"
    patterns |= custom if custom is not None else _layers_plan(hf, layers)
    modules = {name.replace(".base_layer", ""): module for name, module in hf.named_modules()}
    parameters = [name.replace(".base_layer", "") for name, _ in hf.named_parameters()]
    plan: dict[str, Style] = {}
    for pattern, style in patterns.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name in (*modules, *parameters) if expression.fullmatch(name)]
        if not names and custom is not None:
            projections = (re.sub(r"\.\d+\.", ".*.", name) for name in modules if name.endswith("q_proj"))
            raise ValueError(
                f"dtensor_cfg.custom_parallel_plan names {pattern!r}, which is not a module or a parameter of "
                f"{type(hf).__name__}; modules look like {next(projections, 'model.layers.*.mlp')}"
            )
        if style != "colwise" and not modules.keys() >= set(names):
            raise ValueError(
                f"the plan of {hf.config.model_type} models splits the parameter {pattern} as {style!r}; parameters "
                "can only be colwise; set dtensor_cfg.custom_parallel_plan, or tensor_parallel_size=1"
            )
        plan.update(dict.fromkeys(names, style))
    if not {"colwise", "colwise_gather_output"} & set(plan.values()):
        raise ValueError(
            f"the plan of {hf.config.model_type} models does not shard any linear layer. Set "
            "dtensor_cfg.custom_parallel_plan"
        )
    # Parts that compute across tokens take more than hidden states and have linear layers, unlike norms.
    mixers = {
        id(part)
        for layer in layers
        for part in layer.children()
        if len(inspect.signature(part.forward).parameters) > 1
        and any(isinstance(module, nn.Linear) for module in part.modules())
    }
    for name, module in modules.items():
        if id(module) in mixers and not any(f"{named}.".startswith(f"{name}.") for named in plan):
            plan[name] = "whole"
    _check_blocks(hf, plan)
    return plan


def blocks_of(plan: Mapping[str, Style]) -> set[str]:
    """Return the modules, by name, whose inside is split over ranks."""
    return _parents(plan, "colwise")


def whole_blocks_of(plan: Mapping[str, Style]) -> set[str]:
    """Return the modules, by name, that have only single split products, or none."""
    return _parents(plan, "colwise_gather_output") | {name for name, style in plan.items() if style == "whole"}


def _parents(plan: Mapping[str, Style], style: Style) -> set[str]:
    return {name.rpartition(".")[0] for name, found in plan.items() if found == style}


def _check_blocks(hf: PreTrainedModel, plan: Mapping[str, Style]) -> None:
    """Refuse a block that is split and whole as well, and a block inside another.

    The gradients of a block inside another would be summed twice, where each of them starts.
    """
    both = sorted(blocks_of(plan) & whole_blocks_of(plan))
    if both:
        raise ValueError(
            f"the plan of {hf.config.model_type} models splits some layers of {both[0]} as colwise and some as "
            "colwise_gather_output, which is not supported here; set dtensor_cfg.custom_parallel_plan, or "
            "tensor_parallel_size=1"
        )
    blocks = blocks_of(plan) | whole_blocks_of(plan)
    for block in sorted(blocks):
        outer = next((name for name in blocks if block.startswith(f"{name}.")), None)
        if outer is not None:
            raise ValueError(
                f"the plan of {hf.config.model_type} models splits linear layers of {outer} and of {block} inside it, "
                "which is not supported here; set dtensor_cfg.custom_parallel_plan, or tensor_parallel_size=1"
            )


def _layers_plan(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[str, Style]:
    prefix = f"{body_name(hf)}."
    text = hf.config.get_text_config()
    kind = text.model_type
    if kind in PLANS:
        return {prefix + pattern: style for pattern, style in PLANS[kind].items()}
    stated = dict(text.base_model_tp_plan or {})
    experts = {pattern for pattern, word in stated.items() if word == "moe_tp_experts"}
    plan: dict[str, Style] = {}
    for pattern, word in stated.items():
        if pattern.rpartition(".")[0] in experts or word in (*EXPERT_PARAMETERS, VOCABULARY):
            continue
        if word not in STYLES_OF_TRANSFORMERS:
            raise ValueError(
                f"the plan of {kind} models splits {pattern} as {word!r}, which is not supported here; set "
                "dtensor_cfg.custom_parallel_plan, or tensor_parallel_size=1"
            )
        plan[prefix + pattern] = STYLES_OF_TRANSFORMERS[word]
    plan = plan or _named_plan(hf, layers)
    if not plan:
        raise ValueError(
            f"{kind} models have no tensor-parallel plan; set dtensor_cfg.custom_parallel_plan, or "
            "tensor_parallel_size=1"
        )
    return plan


def _named_plan(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[str, Style]:
    """Return a plan for a family without one, if its layers are called as in most families; empty otherwise.

    The check of the family shows whether a model computes the same by it.
    """
    names = {id(module): name.replace(".base_layer", "") for name, module in hf.named_modules()}
    experts = {id(module) for module in expert_modules(hf)}
    plan: dict[str, Style] = {}
    for module in (module for layer in layers for module in layer.modules()):
        if id(module) in experts and takes_choices(module):
            plan[names[id(module)]] = "experts"
        styles = _styles_by_name(module)
        if styles is None:
            return {}
        plan |= {f"{names[id(module)]}.{name}": style for name, style in styles.items()}
    return plan


def _styles_by_name(module: nn.Module) -> dict[str, Style] | None:
    """Return the styles of the parts of a block; empty if a module is not one, None if it has unknown parts."""
    parts = dict(module.named_children())
    bases = {name: dict(part.named_children()).get("base_layer", part) for name, part in parts.items()}
    linear = {name: base for name, base in bases.items() if isinstance(base, nn.Linear)}
    inputs, output = next((kind for kind in NAMED if {*kind[0], kind[1]} <= linear.keys()), ((), ""))
    if not output:
        return {}
    width = linear[output].in_features
    norms = {name: part for name, part in parts.items() if "norm" in name}
    spans_heads = any(weight.numel() == width for norm in norms.values() for weight in norm.parameters())
    if spans_heads or any(parameter is not None for parameter in module._parameters.values()):
        return None
    # A gate of the results of attention is as wide as these.
    split = {*inputs, *(name for name, part in linear.items() if part.out_features == width and name != output)}
    return {**dict.fromkeys(sorted(split), "colwise"), output: "rowwise", **dict.fromkeys(norms, "replicated")}
