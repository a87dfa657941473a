"""Facts of a model that the fields of its Hugging Face config state, read without the libraries that load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_SCALED = ("yarn", "deepseek_yarn", "linear")
"""Types of rotary embeddings that reach further than `max_position_embeddings`; with `dynamic` each length has
frequencies of its own beyond it."""
_RELATIVE = ("bloom", "t5", "mt5")
"""Types of models without their own positions whose configs do not say so."""
_CLASSIFIER = "SequenceClassification"
_OTHER_TASKS = (
    "MaskedLM",
    "MultipleChoice",
    "NextSentencePrediction",
    "PreTraining",
    "QuestionAnswering",
    "RewardModel",
    "Seq2SeqLM",
    "TokenClassification",
)
"""Suffixes of classes whose files hold another head, or a model that reads what comes later in a row."""
_DEQUANTISED = ("fp8", "mxfp4")
ROPE = "rope_parameters"
"""Field with the parameters of rotary embeddings, as `transformers` 5 spells it."""


class HFConfig(Protocol):
    """A config of transformers: fields that every decoder has, and by `__getattr__` further fields of its family."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    tie_word_embeddings: bool

    def __getattr__(self, name: str) -> Any:
        """Return a field of the family.

        Raises:
            AttributeError: If it has no such field.
        """


def with_overrides(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with overrides. Parameters of rotary embeddings are merged over the model's own, so
    that an override need not repeat `rope_theta`."""
    merged = {**fields, **overrides}
    if isinstance(overrides.get(ROPE), Mapping):
        merged[ROPE] = _merged(rope_parameters(fields), overrides[ROPE])
    return merged


def rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary embeddings; a config with older fields has `rope_theta` among them."""
    own = fields.get(ROPE)
    if isinstance(own, Mapping):
        return dict(own)
    older = fields.get("rope_scaling")
    found = dict(older) if isinstance(older, Mapping) else {}
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    if fields.get("rope_theta") is not None:
        found.setdefault("rope_theta", fields["rope_theta"])
    return found


def rope_of_layers(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parameters of rotary embeddings of each kind of layers; one entry if all layers have the same."""
    rope = rope_parameters(fields)
    return [each for each in rope.values() if isinstance(each, Mapping)] or [rope]


def num_positions(fields: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the longest row that a model has positions for; None if its config sets no limit.

    Scaled rotary embeddings reach further than `max_position_embeddings` of some configs says (Qwen2.5 with YaRN).
    """
    attention = fields.get("attn_config")
    if (
        fields.get("model_type") in _RELATIVE
        or bool(fields.get("alibi"))
        or fields.get("position_embedding_type") in ("alibi", "nope")
        or (isinstance(attention, Mapping) and bool(attention.get("alibi")))
    ):
        return None
    stated = next((fields[name] for name in _POSITIONS if isinstance(fields.get(name), int)), None)
    if stated is None or stated <= 0:
        return None
    return max(stated, *(_scaled(layer, stated) for layer in rope_of_layers(fields)))


def image_token(fields: Mapping[str, Any]) -> int | None:
    """Return the id of a composite model's image tokens; None if its config has none.

    Args:
        fields: Fields of the whole model's config.
    """
    given = [fields.get(name) for name in ("image_token_id", "image_token_index")]
    return next((token for token in given if isinstance(token, int)), None)


def unread_quantisation(fields: Mapping[str, Any]) -> str:
    """Return the name of the quantisation of a model's files if they cannot be dequantised when they are read; empty
    otherwise."""
    quantised = fields.get("quantization_config") or fields.get("compression_config")
    if not isinstance(quantised, Mapping):
        return ""
    method = str(quantised.get("quant_method") or ("bitsandbytes" if quantised.get("load_in_4bit") else "unknown"))
    if method == "fp8" and not quantised.get("weight_block_size"):
        return "fp8 without block scales"
    return "" if method in _DEQUANTISED else method


def custom_code(fields: Mapping[str, Any]) -> str:
    """Return the class that a config asks to load from code in the model's folder; empty if it asks for none."""
    classes = fields.get("auto_map")
    if not isinstance(classes, Mapping):
        return ""
    found = next((classes[name] for name in ("AutoModelForCausalLM", "AutoModel", "AutoConfig") if name in classes), "")
    return str(found)


def other_task(fields: Mapping[str, Any], *, has_scalar_head: bool) -> str:
    """Return the class that a config names if it is not one of a causal model with the head that a run needs; empty
    otherwise, and for any class that is unknown.

    Args:
        fields: Fields of the Hugging Face config.
        has_scalar_head: True if the run reads one number for each token; a classifier has a head for it.
    """
    named = fields.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if fields.get("is_encoder_decoder"):
        return architecture or "encoder with a decoder"
    task = architecture.rpartition("For")[2] if "For" in architecture else ""
    is_other = task in _OTHER_TASKS or (task == _CLASSIFIER and not has_scalar_head)
    return architecture if is_other else ""


def _scaled(rope: Mapping[str, Any], stated: int) -> int:
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind not in _SCALED or not isinstance(factor, int | float):
        return stated
    original = rope.get("original_max_position_embeddings")
    return int((original if isinstance(original, int) else stated) * factor)


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of both, the given ones first; models with several kinds of layers have parameters for each."""
    both = {
        key: _merged(own[key], value) if isinstance(value, Mapping) and isinstance(own.get(key), Mapping) else value
        for key, value in given.items()
    }
    return {**own, **both}


def switches_at(fields: Mapping[str, Any]) -> int | None:
    """Return the maximum length that a model with LongRoPE computes with its short factors; None for other models."""
    for each in rope_of_layers(fields):
        if each.get("rope_type") in ("longrope", "su"):
            original = each.get("original_max_position_embeddings", fields.get("original_max_position_embeddings"))
            return original if isinstance(original, int) else None
    return None


def is_composite(fields: Mapping[str, Any]) -> bool:
    """Return whether a config belongs to a model of text and images or sound, which has a config for its text."""
    return isinstance(fields.get("text_config"), Mapping)


def language_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model; in a composite model these are the fields of its text."""
    return dict(fields["text_config"] if is_composite(fields) else fields)


NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of Hugging Face configs with the number of experts."""


def num_experts_of(fields: Mapping[str, Any]) -> int:
    """Return the number of experts of each layer of a language model; 0 without experts."""
    return next((count for name in NUM_EXPERTS if isinstance(count := fields.get(name), int) and count), 0)
