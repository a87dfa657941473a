"""Sizes of a decoder's layers, from the fields of its config: parameters, operations and activations of a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from rl_core.facts.hf_config import num_experts_of
from rl_core.facts.model_size import WIDE_BYTES, ModelSize, size_of_fields
from rl_core.facts.rank_layout import RankLayout

Recompute = Literal["none", "selective", "full"]

_NORMED_HEADS = ("qwen3", "qwen3_moe")
"""Model types that normalise queries and keys."""


@cache
def _published() -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(files(__package__).joinpath("models.json").read_text(encoding="utf-8")))


def published_fields(name: str) -> dict[str, Any]:
    """Return the fields of a published model's config by its name; empty if this package has no shape for it."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    for model in _published():
        if any(fnmatchcase(last, pattern) for pattern in model["names"]):
            return {key: value for key, value in model.items() if key != "names"}
    return {}


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer keeps of a token for its backward pass, on one rank.

    Args:
        none: If nothing is recomputed.
        selective: If all except the results of matrix products and attention is.
        full: If only the layer's input stays.
    """

    none: float
    selective: float
    full: float


@dataclass(frozen=True)
class Shape:
    """Widths of a decoder's layers; numbers of values, not bytes.

    Args:
        size: Numbers of its parameters.
        layers: Layers, of which `dense_layers` have no experts.
        hidden: Width between layers.
        queries, keys, values: Widths of the projections, all heads together. Latent attention pads its values to the
            width of its keys.
        cached: Values that the KV cache keeps for a token and layer, on one rank and on all of them together.
        is_latent: True for latent attention, whose cache every tensor-parallel rank has whole.
        low: Width of the latent projections and their norms.
        heads: Heads of queries.
        normed: Width of normalised queries and keys; 0 without such norms.
        inner: Width of a dense layer's MLP.
        experts: Experts of a layer; 0 without.
        active: Experts of a token.
        expert_inner: Width of an expert.
        shared_inner: Width of the shared experts.
        vocab: Tokens of the vocabulary.
    """

    size: ModelSize
    layers: int
    dense_layers: int
    hidden: int
    queries: int
    keys: int
    values: int
    cached: int
    is_latent: bool
    low: int
    heads: int
    normed: int
    inner: int
    experts: int
    active: int
    expert_inner: int
    shared_inner: int
    vocab: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Shape | None:
        """Return the shape of a decoder with gated MLPs; None if the fields do not determine it.

        Args:
            fields: Fields of the language model's Hugging Face config.
        """
        size = size_of_fields(fields)
        if size is None:
            return None
        hidden, heads, inner = fields["hidden_size"], fields["num_attention_heads"], fields["intermediate_size"]
        head_dim = fields.get("head_dim") or hidden // heads
        kv_heads = fields.get("num_key_value_heads") or heads
        is_latent, low = bool(fields.get("kv_lora_rank")), 0
        queries, keys = heads * head_dim, kv_heads * head_dim
        values, cached = keys, 2 * keys
        if is_latent:
            rotary = fields.get("qk_rope_head_dim") or 0
            queries = keys = values = heads * ((fields.get("qk_nope_head_dim") or 0) + rotary)
            low = fields["kv_lora_rank"] + (fields.get("q_lora_rank") or 0)
            cached = fields["kv_lora_rank"] + rotary
        experts, num_layers = num_experts_of(fields), fields["num_hidden_layers"]
        expert_inner = fields.get("moe_intermediate_size") or inner
        return cls(
            size=size,
            layers=num_layers,
            dense_layers=int(fields.get("first_k_dense_replace") or 0) if experts else num_layers,
            hidden=hidden,
            queries=queries,
            keys=keys,
            values=values,
            cached=cached,
            is_latent=is_latent,
            low=low,
            heads=heads,
            normed=queries + keys if fields.get("model_type") in _NORMED_HEADS else 0,
            inner=inner,
            experts=experts,
            active=int(fields.get("num_experts_per_tok") or 0) if experts else 0,
            expert_inner=expert_inner if experts else 0,
            shared_inner=int(fields.get("n_shared_experts") or 0) * expert_inner,
            vocab=fields["vocab_size"],
        )

    @property
    def active_share(self) -> float:
        """Share of the experts' parameters that a token meets."""
        return self.active / self.experts if self.experts else 0.0

    @property
    def products(self) -> float:
        """Multiplications of a token in the matrices of all layers, without the head."""
        return self.size.layers + self.size.experts * self.active_share

    @property
    def head_products(self) -> float:
        """Multiplications of a token in the head."""
        return float(self.vocab * self.hidden)

    def attention_flops(self, length: float) -> float:
        """Return the operations of attention in a forward pass over a row of this length, all layers together. Windows
        are not considered."""
        return 2.0 * self.layers * (self.queries + self.queries) * length * (length + 1) / 2

    def cache_values(self, tensor: int) -> float:
        """Return the values that the KV cache of one of so many tensor-parallel ranks keeps for a token."""
        if self.is_latent:
            return float(self.layers * self.cached)
        # A rank has at least one head of keys and values.
        head = self.queries / self.heads
        return self.layers * max(self.cached / tensor, 2 * head)

    def kept(self, layout: RankLayout, itemsize: int, *, has_experts: bool, has_adapters: bool = False) -> Kept:
        """Return what a layer keeps of a token on one rank.

        Tensors between blocks, which have the width of hidden states, are whole on tensor-parallel ranks unless these
        share tokens; the rest is shared.

        Args:
            layout: Ranks that share the layer.
            itemsize: Bytes of a value in the dtype that the model computes in.
            has_experts: True for a layer with experts.
            has_adapters: True if only adapters train, so that the inputs of norms need not stay.
        """
        shared = layout.tensor if layout.splits_tokens else 1
        h, q, k, v = self.hidden, self.queries, self.keys, self.values
        # Input and output of both norms; queries and keys after their rotation, values, and attention's result.
        between, within = 4.0 * h, 2.0 * q + k + v
        results = 2.0 * q + k + v  # Of the projections, and of attention.
        entered = float(h)
        results_between = float(h)  # Of attention's output projection.
        if self.is_latent:
            within += 2 * self.low + k  # Low-rank projections with their norms, and the result of the second one.
            results += self.low
        within += self.normed  # Queries and keys before their norms.
        if layout.joins_projections:
            within += q + k
        if has_experts:
            copies, wide = float(self.active * h), float(self.active * self.expert_inner)
            between += copies  # Inputs of the experts.
            within += 3 * wide + 3 * self.shared_inner
            results += 2 * wide + 2 * self.shared_inner
            results_between += copies + (h if self.shared_inner else 0)
            width = self.active * self.expert_inner + self.shared_inner
        else:
            within += 3 * self.inner
            results += 2 * self.inner
            results_between += h
            width = self.inner
        numbers = WIDE_BYTES * self.heads / layout.tensor  # The logarithms of attention's sums.
        if has_experts:
            numbers += 4 * WIDE_BYTES * self.experts / shared  # Scores of the router.
        travels = has_experts and layout.experts > 1 and not layout.joins_projections
        if travels:
            # A token travels once to each rank that has experts of it. It stays as it is sent, received and put in
            # order, and so do its results, before and after they return.
            between += 5 * layout.experts * (1 - (1 - 1 / layout.experts) ** self.active) * h
        if has_adapters:
            # The product of an adapter has the width of the result that it is added to.
            results, results_between = 2 * results, 2 * results_between
        if not layout.is_fused:
            # Unfused norms keep their normalised input, in float32 if that is wider, and gates their activation.
            is_wide = int(itemsize < WIDE_BYTES)
            between += 2 * (is_wide + (not has_adapters)) * h
            within += width + (is_wide + (not has_adapters)) * self.normed
            numbers += 2 * itemsize * self.queries / self.heads  # Cosines and sines of the rotation.
            if travels:
                within += self.active * self.expert_inner  # Weights multiply what the second product takes.
            elif has_experts:
                between += self.active * h  # Results of experts before their weights.
            if layout.joins_projections:
                # Rows are attended one by one and joined. Gates add a constant first.
                within += width + q
                if layout.context > 1:
                    # Keys and values of all context-parallel ranks stay in place of the rank's own. Norms that do not
                    # cast keep what they are given.
                    within += 2 * layout.context * k - (k if self.normed and itemsize == WIDE_BYTES else 2 * k + v)
        if layout.splits_tokens and not layout.joins_projections:
            # Gathered inputs of both blocks stay. Megatron gathers them again in the backward pass.
            between += 2 * h * (layout.tensor - 1)
        scale_between, scale_within = itemsize / shared, itemsize / layout.tensor
        none = between * scale_between + within * scale_within + numbers
        selective = (results_between + entered) * scale_between + results * scale_within
        selective += WIDE_BYTES * self.heads / layout.tensor
        if layout.recomputed:
            again_between, again_within = self._again(layout, has_experts=has_experts)
            selective = none - again_between * scale_between - again_within * scale_within
        return Kept(none, selective, entered * scale_between)

    def _again(self, layout: RankLayout, *, has_experts: bool) -> tuple[float, float]:
        """Return the widths, between blocks and within them, of what the named parts of a layer need not keep."""
        gates = 3.0 if layout.is_fused else 5.0
        parts: dict[str, tuple[float, float]] = {}
        if has_experts:
            wide, copies = float(self.active * self.expert_inner), float(self.active * self.hidden)
            parts["layernorm"] = (self.hidden * (1.0 + self.is_latent), 0.0)
            parts["moe_act"] = (0.0, wide)
            parts["shared_experts"] = (0.0, gates * self.shared_inner)
            parts["moe"] = (copies if layout.is_fused else 2 * copies, gates * (wide + self.shared_inner))
        else:
            # In Transformer Engine the norm before is a part of the first product.
            parts["mlp"] = (float(self.hidden) if layout.is_fused else 0.0, gates * self.inner)
        if self.is_latent:
            parts.setdefault("layernorm", (float(self.hidden), 0.0))
            parts["mla_up_proj"] = (0.0, 2.0 * self.queries + 2 * self.keys + self.values)
        names = set(layout.recomputed) & parts.keys() or {"moe" if has_experts else "mlp"}
        if "moe" in names:
            names -= {"moe_act", "shared_experts"}
        found = [parts[name] for name in names]
        return sum(between for between, _ in found), sum(within for _, within in found)


def adapter_parameters(fields: Mapping[str, Any], lora: Any, tensor: int = 1) -> float:
    """Return the number of parameters of low-rank adapters, as far as the usual names of layers determine it.

    Args:
        fields: Fields of the language model's Hugging Face config.
        lora: Section `lora_cfg` of the model.
        tensor: Tensor-parallel ranks, which all have the side of an adapter that is not split; it counts as often.
    """
    shape = Shape.of(fields)
    if shape is None or not lora.enabled:
        return 0.0
    hidden, inner = shape.hidden, shape.inner
    ends = {
        "q_proj": (hidden, shape.queries),
        "k_proj": (hidden, shape.keys),
        "v_proj": (hidden, shape.values),
        "o_proj": (shape.queries, hidden),
    }
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    targets = {name.rpartition(".")[2] for name in lora.target_modules}
    excluded = {name.rpartition(".")[2] for name in lora.exclude_modules}

    def sizes(found: Mapping[str, tuple[int, int]]) -> float:
        chosen = [name for name in found if (name in targets or not targets) and name not in excluded]
        # The output is split, except for the two whose input is.
        whole = {name: int(name in ("o_proj", "down_proj")) for name in chosen}
        return float(
            sum(lora.dim * (tensor * found[name][side] + found[name][1 - side]) for name, side in whole.items())
        )

    return float(lora.max_adapters) * (shape.layers * sizes(ends) + shape.dense_layers * sizes(mlp))
