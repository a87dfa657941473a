"""Numbers of a model's parameters, from the fields of its config or from its name, and the memory that a rank needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rl_core.facts.hf_config import num_experts_of
from rl_core.facts.parameter_patterns import TrainedPatterns, trained_names, unmatched

WIDE_BYTES = 4
"""Bytes of a float32, the dtype of summed gradients and of optimizers."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_NORMS = (
    "self_attn.q_norm.weight", "self_attn.k_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"
)  # fmt: skip
_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?:-A(\d+(?:\.\d+)?)B)?(?![A-Za-z0-9])", re.IGNORECASE)
_LANGUAGE = re.compile(r"^model\.")
_UNITS = {"B": 10**9, "M": 10**6}


class ModelTensor(NamedTuple):
    """A tensor of a model.

    Args:
        name: Name in the Hugging Face model.
        part: The field of `ModelSize` that counts it.
        size: Number of its parameters.
    """

    name: str
    part: str
    size: int


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model's parameters.

    Args:
        layers: Parameters in layers, outside of experts.
        experts: Parameters in experts.
        embedding: Parameters of the embedding.
        head: Parameters of the head; 0 if it is tied to the embedding.
        vision: Parameters of the vision tower and the projector, which the first pipeline stage has and tensor-parallel
            ranks do not split.
    """

    layers: float
    experts: float = 0
    embedding: float = 0
    head: float = 0
    vision: float = 0

    @classmethod
    def of(cls, tensors: Iterable[ModelTensor]) -> ModelSize:
        """Add up the tensors of a model."""
        counts = dict.fromkeys(("layers", "experts", "embedding", "head", "vision"), 0)
        for tensor in tensors:
            counts[tensor.part] += tensor.size
        return cls(**counts)

    @property
    def count(self) -> float:
        """All parameters."""
        return self.layers + self.experts + self.embedding + self.head + self.vision

    def dense_of_rank(self, stages: int, tensor: int) -> float:
        """Return the parameters outside of experts on a rank of the largest of several pipeline stages, whose
        tensor-parallel ranks split everything except the vision tower."""
        return self.layers / (stages * tensor) + self.ends_of_rank(stages, tensor)

    def ends_of_rank(self, stages: int, tensor: int) -> float:
        """Return those of them that are outside of layers."""
        first, last = self.embedding / tensor + self.vision, self.head / tensor
        return first + last if stages == 1 else max(first, last)


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank needs for a model, next to activations and logits.

    Args:
        device: Weights, gradients and optimizer state on the device.
        kept: The part of it that waits in host memory while others use the device.
        weights: Weights that train.
        host: Bytes that are always in host memory.
        optimizer: The part that is the state of the optimizer.
    """

    device: float
    kept: float
    weights: float
    host: float = 0
    optimizer: float = 0

    @property
    def gradients(self) -> float:
        """Bytes of gradients, which are dropped while others use the device."""
        return self.device - self.kept


def size_of_fields(fields: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of a decoder with gated MLPs, without norms and biases; None if the fields do not determine it.

    Args:
        fields: Fields of the language model's Hugging Face config.
    """
    tensors = _tensors(fields)
    return None if tensors is None else ModelSize.of(tensors)


def trained_size(
    model: TrainedPatterns, fields: Mapping[str, Any], size: ModelSize, vision: Sequence[ModelTensor] = ()
) -> ModelSize:
    """Return the numbers of the parameters that train by `freeze` and `train_only`, as far as a process without the
    model can know: all of them if a pattern does not match the names of the usual decoders in transformers.

    Args:
        model: Config section of the model.
        fields: Fields of the language model's Hugging Face config.
        size: All parameters of the model.
        vision: Tensors of its vision tower and projector that train if no pattern excludes them.
    """
    whole = replace(size, vision=sum(tensor.size for tensor in vision))
    if not (model.freeze or model.train_only) or (tensors := _tensors(fields)) is None:
        return whole
    if vision:
        tensors = [each._replace(name=_LANGUAGE.sub("model.language_model.", each.name)) for each in tensors]
    tensors = [*tensors, *vision]
    names = [tensor.name for tensor in tensors]
    if unmatched([*model.freeze, *model.train_only], names):
        return whole
    trained = set(trained_names(model, names))
    return ModelSize.of(tensor for tensor in tensors if tensor.name in trained)


def _tensors(fields: Mapping[str, Any]) -> list[ModelTensor] | None:
    """Return the tensors of a decoder with gated MLPs, norms and biases without parameters, so that patterns match
    them; None if the fields do not determine it."""
    values = [fields.get(name) for name in _SIZES]
    if not all(isinstance(value, int) and value > 0 for value in values):
        return None
    hidden, num_layers, _, inner, vocab = (int(value or 0) for value in values)
    attention = _latent_attention(fields) if fields.get("kv_lora_rank") else _attention(fields)
    count = num_experts_of(fields)
    shared = int(fields.get("n_shared_experts") or 0) * (fields.get("moe_intermediate_size") or inner) * hidden
    expert = count * hidden * (fields.get("moe_intermediate_size") or inner)
    num_dense = int(fields.get("first_k_dense_replace") or 0) if count else num_layers
    found = [ModelTensor("model.embed_tokens.weight", "embedding", vocab * hidden)]
    for layer in range(num_layers):
        weights = {f"self_attn.{name}.weight": size for name, size in attention.items()}
        weights |= {f"self_attn.{name}.bias": 0 for name in attention} | dict.fromkeys(_NORMS, 0)
        if layer < num_dense:
            weights |= {f"mlp.{name}.weight": hidden * inner for name in ("gate_proj", "up_proj", "down_proj")}
        else:
            weights["mlp.gate.weight"] = 0
            if shared:
                parts = ("gate_proj", "up_proj", "down_proj")
                weights |= {f"mlp.shared_experts.{name}.weight": shared for name in parts}
        found += [ModelTensor(f"model.layers.{layer}.{name}", "layers", size) for name, size in weights.items()]
        if layer >= num_dense:
            of_experts = {"gate_up_proj": 2 * expert, "down_proj": expert}
            prefix = f"model.layers.{layer}.mlp.experts"
            found += [ModelTensor(f"{prefix}.{name}", "experts", size) for name, size in of_experts.items()]
    found.append(ModelTensor("model.norm.weight", "layers", 0))
    if not fields.get("tie_word_embeddings"):
        found.append(ModelTensor("lm_head.weight", "head", vocab * hidden))
    return found


def _attention(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the parameters of the matrices of a layer's attention, by name."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or hidden // heads
    queries, keys = hidden * head_dim * heads, hidden * head_dim * (fields.get("num_key_value_heads") or heads)
    return {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}


def _latent_attention(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the parameters of the matrices of a layer's latent attention, as in DeepSeek-V3, by name."""
    hidden, heads, low = fields["hidden_size"], fields["num_attention_heads"], fields["kv_lora_rank"]
    nope, rotary = fields.get("qk_nope_head_dim") or 0, fields.get("qk_rope_head_dim") or 0
    values, queries = fields.get("v_head_dim") or 0, fields.get("q_lora_rank")
    low_queries = (
        {"q_a_proj": hidden * queries, "q_b_proj": queries * heads * (nope + rotary)}
        if queries
        else {"q_proj": hidden * heads * (nope + rotary)}
    )
    return {
        **low_queries,
        "kv_a_proj_with_mqa": hidden * (low + rotary),
        "kv_b_proj": low * heads * (nope + values),
        "o_proj": heads * values * hidden,
    }


def size_of_name(name: str) -> ModelSize | None:
    """Return the size in a model's name, such as `Llama-3.3-70B` or `Qwen3-30B-A3B`; None if it has none."""
    found = _IN_NAME.search(name.rstrip("/").rpartition("/")[2])
    if found is None:
        return None
    count, unit, active = found.groups()
    whole = float(count) * _UNITS[unit.upper()]
    dense = float(active) * _UNITS["B"] if active else whole
    return ModelSize(min(dense, whole), max(0.0, whole - dense))
