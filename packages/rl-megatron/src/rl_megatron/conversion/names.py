"""Megatron's parameter names, numbered over the whole model instead of over what a rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Names of the norms in Transformer Engine's fused layers, to their names in the local layers."""


def held_weights(chunks: Sequence[Any], config: TransformerConfig, expert_rank: int) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank by their global local-layer names.

    Args:
        chunks: This rank's virtual stages, each a `megatron.core.models.gpt.GPTModel`.
        config: Config of the model.
        expert_rank: Among the ranks that share the experts; each holds consecutive ones.
    """
    first_expert = 0
    if config.num_moe_experts is not None:
        first_expert = expert_rank * (config.num_moe_experts // config.expert_model_parallel_size)
    held = {}
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        transient = {name for name, _ in _transient_buffers(chunk)}
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name not in transient:
                held[global_name(name, numbers, first_expert)] = tensor
    return held


def global_name(name: str, layer_numbers: list[int], first_expert: int) -> str:
    """The name over the whole model.

    Args:
        name: Name of a parameter or buffer in a chunk of this rank.
        layer_numbers: Numbers of the chunk's layers in the whole model, from 0.
        first_expert: Number of this rank's first expert.
    """
    name = LAYER.sub(lambda found: f"decoder.layers.{layer_numbers[int(found[1])]}.", name)
    name = GROUPED_EXPERT.sub(lambda found: f".experts.local_experts.{found[2]}.{found[1]}.weight", name)
    name = LOCAL_EXPERT.sub(lambda found: f".experts.local_experts.{int(found[1]) + first_expert}.", name)
    for fused, plain in FUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + plain
    return name


def _transient_buffers(chunk: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Buffers that checkpoints do not hold."""
    for prefix, module in chunk.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name, module.get_buffer(name)
