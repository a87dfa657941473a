"""Megatron parameters, named over the whole model, and the Hugging Face tensors they are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rl_megatron.conversion.splits import Split

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Name of each norm in Transformer Engine's fused layers to its name in the local layers."""


class HFTensor(NamedTuple):
    """Name and shape of a tensor in Hugging Face files."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightMap:
    """Source and target of a parameter.

    Args:
        target: Megatron's name with the local layers, layers and experts numbered over the whole model.
        sources: The Hugging Face tensors, in the order that `split` numbers them.
        split: How it is made of them, and spread.
        over: The ranks it is spread over: `tp`, or `etp` for experts.
        copy_of: Target of the map whose weights it repeats (a tied head on its own pipeline rank); a copy is
            loaded, and never sent, exported or saved.
        dtype: Dtype of the parameter in this family, and of its tensors in exports and on the wire, whatever the
            rest of the model has; None if it has the model's. Tensors may also stay float32 because the files or
            `transformers` have them so (`rl_megatron.model.precision`).
    """

    target: str
    sources: tuple[HFTensor, ...]
    split: Split
    over: Literal["tp", "etp"] = "tp"
    copy_of: str | None = None
    dtype: Literal["float32"] | None = None

    @property
    def stored(self) -> str:
        """Name of the parameter in checkpoints."""
        return self.copy_of or self.target

    def check_split(self, size: int) -> None:
        """Refuse to spread it over a number of ranks that does not fit.

        Raises:
            ValueError: If the number does not fit, with the name of the tensor.
        """
        if not self.split.divides(size):
            name = "expert_tensor" if self.over == "etp" else "tensor_model"
            raise ValueError(
                f"megatron_cfg.{name}_parallel_size: {self.sources[0].name} cannot be spread over {size} ranks; use "
                "fewer"
            )


class AdapterMap(NamedTuple):
    """A low-rank adapter of one Hugging Face weight. It adds `scale * up @ down` to the weight.

    Args:
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
    """

    down: WeightMap
    up: WeightMap
    scale: float


def held_weights(chunks: Sequence[Any], config: TransformerConfig, expert_rank: int) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of this rank by their global local-layer names.

    Args:
        chunks: This rank's virtual stages, each a `megatron.core.models.gpt.GPTModel`.
        config: Config of the model.
        expert_rank: Rank among those that share the experts; each holds consecutive ones.
    """
    first_expert = 0
    if config.num_moe_experts is not None:
        first_expert = expert_rank * (config.num_moe_experts // config.expert_model_parallel_size)
    held = {}
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        # Checkpoints do not hold non-persistent buffers.
        transient = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in chunk.named_modules()
            for name in module._non_persistent_buffers_set
        }
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name not in transient:
                held[global_name(name, numbers, first_expert)] = tensor
    return held


def global_name(name: str, layer_numbers: list[int], first_expert: int) -> str:
    """Return the name of a parameter over the whole model.

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
