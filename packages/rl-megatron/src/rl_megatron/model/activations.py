"""Memory and products of a layer, from the shape of the model: formulas for the layers of megatron-core 0.16.1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from rl_core.torch.training.recompute import ActivationsUnknown, LayerActivations

REST = "rest"
"""The part of a layer that no key of selective recomputation covers."""
WITHIN = {"moe": ("moe_act", "shared_experts")}
"""Parts that are recomputed with another one."""
_WIDE = torch.float32.itemsize


@dataclass(frozen=True)
class Part:
    """A part of a layer, for one token on one rank.

    Args:
        kept: Bytes that stay for the backward pass and do not if the part is recomputed.
        products: Multiplications in its matrix products.
        weights: Parameters of these products, except those of experts.
        expert_weights: Parameters of experts.
    """

    kept: float = 0.0
    products: float = 0.0
    weights: float = 0.0
    expert_weights: float = 0.0

    @classmethod
    def linear(cls, kept: float, weights: float) -> Part:
        """A part in which the token meets every weight once."""
        return cls(kept, weights, weights)

    def __add__(self, other: Part) -> Part:
        return Part(
            self.kept + other.kept,
            self.products + other.products,
            self.weights + other.weights,
            self.expert_weights + other.expert_weights,
        )


@dataclass(frozen=True)
class LayerShape:
    """Parts of one layer by their names in `recompute_modules`, and `REST`.

    Args:
        parts: Parts of the layer.
        entered: Bytes of the layer's input, per token.
    """

    parts: Mapping[str, Part]
    entered: float

    def activations(self, modules: Iterable[str]) -> LayerActivations:
        """Return the bytes that the layer keeps, if these parts are the ones that selective recomputation covers."""
        kept = self.whole.kept
        again = sum(self.parts[name].kept for name in self._covered(modules))
        return LayerActivations(round(kept), round(kept - again), round(self.entered))

    def products_of(self, modules: Iterable[str]) -> float:
        """Return the multiplications that recomputing these parts takes."""
        return sum(self.parts[name].products for name in self._covered(modules))

    @property
    def whole(self) -> Part:
        """All parts together."""
        return sum(self.parts.values(), Part())

    def _covered(self, modules: Iterable[str]) -> set[str]:
        names = {inner for name in modules for inner in (name, *WITHIN.get(name, ()))}
        return names & self.parts.keys()


class LayerShapes:
    """Shapes of a model's layers.

    A formula counts what autograd and the layers of Transformer Engine keep: inputs of matrix products, of norms and
    of activations, and queries, keys, values and results of flash attention. Tokens are assumed to be spread evenly
    over experts. Layers without Transformer Engine also keep the intermediate results of unfused operations.

    Args:
        config: Megatron's config of the model and the layout.
        has_te: True if the layers are Transformer Engine's.
        longest: Maximum length of a row, on which the products of attention scores depend.
    """

    def __init__(self, config: TransformerConfig, *, has_te: bool, longest: int) -> None:
        # fields that the check of the family's config left open are numbers here
        self._config: Any = config
        self._has_te = has_te
        self._longest = longest
        self._item = config.params_dtype.itemsize
        self._tensor = config.tensor_model_parallel_size
        self._tokens = self._tensor if config.sequence_parallel else 1  # ranks that share tokens between blocks
        self._between = config.hidden_size * self._item / self._tokens

    def layers(self) -> list[LayerShape]:
        """Return the shape of each layer of the model.

        Raises:
            ActivationsUnknown: If the model has layers without a formula.
        """
        if self._config.linear_attention_freq is not None:
            raise ActivationsUnknown("there is no formula for linear attention")
        pattern = self._config.moe_layer_freq
        count, has_experts = self._config.num_layers, self._config.num_moe_experts is not None
        every = pattern if isinstance(pattern, list) else [number % pattern == 0 for number in range(count)]
        return [self._layer(has_experts=has_experts and bool(each)) for each in every]

    def _layer(self, *, has_experts: bool) -> LayerShape:
        parts: dict[str, Part] = {}
        attention = self._latent_attention() if self._config.multi_latent_attention else self._attention()
        for each in (attention, self._experts() if has_experts else self._dense()):
            for name, part in each.items():
                parts[name] = parts.get(name, Part()) + part
        return LayerShape(parts, self._between)

    def _norm(self, width: float) -> float:
        """Bytes that a norm keeps in addition to its input and its output."""
        return 0.0 if self._has_te else width * (self._item + (_WIDE if self._item < _WIDE else 0))

    def _block_norm(self, *, is_separate: bool) -> dict[str, Part]:
        """The norm before a block, with its input and its output.

        Args:
            is_separate: True if it is a module of its own also among layers of Transformer Engine.
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
        kept = (projected + queries + keys) * self._item  # before and after rotation; values are not copied
        if config.qk_layernorm:
            kept += (queries + keys) * self._item + self._norm(queries + keys)
        norms = self._block_norm(is_separate=False)
        kept += self._rotation(config.kv_channels) + queries * self._item
        rest = norms[REST] + Part.linear(kept, config.hidden_size * (projected + queries))
        return {**norms, REST: rest, "core_attn": self._scores(queries, keys, queries + keys)}

    def _latent_attention(self) -> dict[str, Part]:
        config = self._config
        heads, rotary = config.num_attention_heads / self._tensor, config.qk_pos_emb_head_dim
        per_query, per_value = config.qk_head_dim + rotary, config.v_head_dim
        low = (config.q_lora_rank or 0) + config.kv_lora_rank
        up = heads * (per_query + config.qk_head_dim + per_value)
        norms = self._block_norm(is_separate=True)
        # inputs and outputs of the norms between the two projections
        kept = (2 * low * self._item + self._norm(low)) / self._tokens
        out = heads * per_value
        weights = config.hidden_size * (low + rotary + out)
        if config.q_lora_rank is None:
            weights += config.hidden_size * heads * per_query
        up_weights = (config.q_lora_rank or 0) * heads * per_query
        up_weights += config.kv_lora_rank * heads * (config.qk_head_dim + per_value)
        # what is projected, then queries and keys with their rotated parts, and values
        projected = (up + 2 * heads * per_query + out) * self._item
        return {
            **norms,
            REST: norms[REST] + Part.linear(kept + out * self._item, weights),
            "mla_up_proj": Part.linear(projected + self._rotation(rotary), up_weights),
            "core_attn": self._scores(out, heads * per_query, heads * (per_query + per_value)),
        }

    def _rotation(self, width: float) -> float:
        """Bytes of the cosines and sines that rotating queries and keys keeps, unless one kernel does it."""
        return 0.0 if self._config.apply_rope_fusion else 4 * width * self._item

    def _scores(self, out: float, keys: float, sums: float) -> Part:
        """Attention itself, whose inputs and output are counted where they are made.

        Args:
            out: Width of its output.
            keys: Width of keys.
            sums: Widths that scores and their products with values go over, together.
        """
        config = self._config
        kept = _WIDE * config.num_attention_heads / self._tensor
        if not self._has_te:
            # rows are attended one by one and joined, and context-parallel ranks gather keys and values
            context = config.context_parallel_size
            kept += (out + (2 * context * keys if context > 1 else 0)) * self._item
        return Part(kept, sums * self._longest / 2)  # half of the scores are masked

    def _dense(self) -> dict[str, Part]:
        config = self._config
        norms = self._block_norm(is_separate=False)
        inner = config.ffn_hidden_size / self._tensor
        kept = self._gated(inner)
        if self._has_te:
            # the norm is a part of the first product
            norms = {REST: Part(self._between)}
            kept += self._between
        return {**norms, "mlp": Part.linear(kept, 3 * config.hidden_size * inner)}

    def _experts(self) -> dict[str, Part]:
        config = self._config
        expert_tensor = config.expert_tensor_parallel_size or self._tensor
        copies = config.moe_router_topk * expert_tensor / self._tokens
        inner = config.moe_ffn_hidden_size / expert_tensor
        activated = copies * inner * self._item
        # logits, scores and probabilities in float32, and the map of tokens to experts
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
        """Bytes between the two products of a gated block: both halves, and the activation.

        Args:
            inner: Width of each half.
            is_weighted: True if the activation is multiplied by the weight of an expert.
        """
        config = self._config
        is_fused = config.bias_activation_fusion or config.use_te_activation_func
        return inner * self._item * (3 if is_fused else 5 if is_weighted else 4)
