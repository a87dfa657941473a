"""What a step's operations follow from, read off a whole model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl_core.torch.training.flops import AttentionShape, ModelShape
from rl_dtensor.attention import ROW_LAYERS
from rl_dtensor.parallel.experts import expert_modules


def shape_of(hf: PreTrainedModel) -> ModelShape:
    """The shape of a model with its adapters, before anything is split; it may be on `meta`."""
    config = hf.config.get_text_config()
    stacked = {id(module) for module in expert_modules(hf)}
    matrices = trained = 0
    for module in hf.modules():
        if isinstance(module, nn.Embedding):  # looked up; a tied head multiplies with it under its own name
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.dim() < 2:
                continue
            entries = parameter.numel()
            if id(module) in stacked:
                entries = _of_one_token(parameter, config)
            matrices += entries
            trained += entries if parameter.requires_grad else 0
    return ModelShape(matrices, trained, _attention(config))


def _of_one_token(parameter: nn.Parameter, config: PreTrainedConfig) -> int:
    """Entries of the experts that a token is sent to; biases are not multiplied with."""
    if parameter.dim() < 3:
        return 0
    num_experts = parameter.shape[0]
    return parameter.numel() // num_experts * int(_setting(config, "num_experts_per_tok") or num_experts)


def _attention(config: PreTrainedConfig) -> tuple[AttentionShape, ...]:
    """Of every layer of full or sliding attention; what linear attention adds to its matrices is little."""
    num_heads = _setting(config, "num_attention_heads")
    if not num_heads:
        return ()
    head_dim = _setting(config, "head_dim") or _setting(config, "hidden_size") // num_heads
    rotary_dim = _setting(config, "qk_rope_head_dim")
    key_dim = head_dim if rotary_dim is None else (_setting(config, "qk_nope_head_dim") or 0) + rotary_dim
    value_dim = _setting(config, "v_head_dim") or head_dim
    window = _setting(config, "sliding_window")
    kinds = _setting(config, "layer_types")
    if kinds is None:
        kinds = ["sliding_attention"] * _setting(config, "num_hidden_layers")
    return tuple(
        AttentionShape(num_heads, key_dim, value_dim, window if kind == "sliding_attention" else None)
        for kind in kinds
        if kind in ROW_LAYERS
    )


def _setting(config: PreTrainedConfig, name: str) -> Any:
    """A field by the name that most families have for it."""
    return config.to_dict().get(config.attribute_map.get(name, name))
