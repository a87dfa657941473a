"""A Hugging Face model made ready for generation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rl_core.errors import ConfigError
from rl_core.facts.hf_config import is_composite
from rl_core.model_config import ModelConfig
from rl_core.torch.files.language_part import KEY_MAPPING, read_composite_config, read_language_config
from rl_core.torch.files.model_code import run_model_code
from rl_core.torch.files.model_files import WeightFiles, model_folder
from rl_core.torch.training.flops import CHUNKED, RECURRENT_LAYERS, ROW_LAYERS
from rl_dtensor.generation.batch import last_logits
from rl_dtensor.generation.cache import Kind, RowCache, has_states, row_layers
from rl_dtensor.generation.decoding_pass import DecodingPass, pass_problem
from rl_dtensor.model.precision import Kept, widen
from rl_dtensor.model.weights import Catalog, persistent, read_into
from rl_dtensor.model.whole import fix_frequencies

_logger = logging.getLogger(__name__)

# The code of chunked attention in transformers counts the places of queries with padding (Llama 4).
_LAYER_TYPES = (ROW_LAYERS - {CHUNKED}) | RECURRENT_LAYERS

_PROBE_TOKENS = 9

_FAMILY_ERRORS = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code for calls that it did not foresee."""


def load_model(model: ModelConfig, attn_implementation: str, device: torch.device) -> PreTrainedModel:
    """Load the causal language model `model.model_name` in its precision, without dropout; with `vision.enabled` the
    whole vision-language model.

    Raises:
        ConfigError: For a type without such a model in `transformers`, a field in `hf_config_overrides` that the
            model does not have, attention that `attn_implementation` does not compute, or weights that are missing.
    """
    if model.trust_remote_code is not None:
        run_model_code(model_folder(model.model_name), model.trust_remote_code)
    config = hf_config(model)
    if not model.vision.enabled and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        remedy = "set policy.vision.enabled=true, or" if config.get_text_config() is not config else "set"
        raise ConfigError(
            f"transformers has no causal language model of the type {config.model_type}, which {model.model_name} has; "
            f"{remedy} another policy.generation.backend"
        )
    fields = config.get_text_config().to_dict()
    # Whole vision-language models take `sdpa`.
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    has_sdpa = family is None or bool(family._supports_sdpa)
    if attn_implementation == "auto":
        computes = not fields.get("attn_logit_softcapping") and has_sdpa
        attn_implementation = "sdpa" if computes else "eager"
    if fields.get("attn_logit_softcapping") and attn_implementation == "sdpa":
        raise ConfigError(
            f"sdpa computes attention without the softcap that {model.model_name} has; "
            "set hf_cfg.attn_implementation=eager"
        )
    if attn_implementation == "sdpa" and not has_sdpa:
        raise ConfigError(
            f"transformers does not compute the attention of {model.model_name} with sdpa; set "
            "hf_cfg.attn_implementation=eager"
        )
    # In this process `sdpa` then computes passes over one token by groups of heads.
    AttentionInterface.register("sdpa", grouped_attention)
    auto: Any = AutoModelForImageTextToText if model.vision.enabled else AutoModelForCausalLM
    is_part = not model.vision.enabled and is_composite(PreTrainedConfig.get_config_dict(model.model_name)[0])
    result: Any = auto.from_pretrained(
        model.model_name,
        config=config,
        dtype=getattr(torch, model.precision),
        attn_implementation=attn_implementation,
        output_loading_info=True,
        key_mapping=KEY_MAPPING if is_part else None,
    )
    loaded, info = result
    if info["missing_keys"]:  # transformers has filled them at random.
        raise ConfigError(
            f"the files of {model.model_name} lack {', '.join(sorted(info['missing_keys']))}; save the whole model"
        )
    _keep_float32(loaded, model_folder(model.model_name))
    try:
        fix_frequencies(loaded, model.max_total_sequence_length)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return loaded.to(device).eval().requires_grad_(False)


@torch.no_grad()
def _keep_float32(hf: PreTrainedModel, folder: Path) -> None:
    """Make a model compute in float32 with the same tensors as a trained model of these files; `transformers` keeps
    only the tensors that the family's class lists."""
    try:
        catalog, files = Catalog.of(hf, lambda name: 0), WeightFiles.of(folder)
    except ValueError:  # No policy trains a model of such files.
        return
    names = Kept.of(hf, catalog, files, hf.dtype).computed
    held = persistent(hf)
    wider = [entry for entry in catalog.entries if entry.name in names and held[entry.name].dtype != torch.float32]
    widen(hf, {entry.name for entry in wider})
    held = persistent(hf)
    with files.open() as opened:
        for entry in wider:
            for piece in catalog.sources(entry, files.names) or ():
                read_into(opened, piece, held[entry.name])


@torch.inference_mode()
def cache_layers(hf: PreTrainedModel, name: str) -> tuple[Kind, ...] | None:
    """Return the kinds of the layers of the cache that a model decodes with; None if it must be decoded without one.

    A model is decoded without a cache, and a warning gives the reason, if its layers keep something else than a
    `RowCache` holds, if its code refuses such a cache, or if it does not compute the same token by token as in one
    pass. Logprobs of models without states are compared only in float32: in bfloat16 rounding may choose other experts.

    Raises:
        ConfigError: If the model's code fails in a plain pass, or if a token's logprobs change with the tokens after
            it: no way of decoding agrees with one pass.
    """
    vocab_size = cast("nn.Embedding", hf.get_input_embeddings()).num_embeddings
    tokens = torch.arange(_PROBE_TOKENS, device=hf.device)[None] % vocab_size
    try:
        whole = hf(input_ids=tokens, use_cache=False).logits
    except _FAMILY_ERRORS as error:
        raise ConfigError(
            f"the hf generator cannot decode {name}: its code in transformers fails in a plain pass "
            f"({type(error).__name__}: {error}); use another generation.backend"
        ) from error
    try:
        foreign = sorted(set(hf.config.get_text_config().to_dict().get("layer_types") or ()) - _LAYER_TYPES)
        if foreign:
            known = ", ".join(sorted(_LAYER_TYPES))
            raise ValueError(f"its layers are {', '.join(foreign)}, and a cache serves {known}")
        kinds = row_layers(hf.config)
        problem = _cache_problem(hf, kinds, tokens, whole)
    except ValueError as error:
        problem = str(error)
    if not problem:
        return kinds
    parts = [last_logits(hf, tokens[:, : end + 1]) for end in range(tokens.shape[1])]
    off = _largest_difference(torch.stack(parts, 1), whole)
    if not off <= _tolerance(whole) and whole.dtype == torch.float32:
        raise ConfigError(
            f"the hf generator cannot decode {name}: its code in transformers computes other logprobs for the start of "
            f"a row than for the row (off by {off:.2g}); use another generation.backend"
        )
    _logger.warning(
        "%s is decoded without a cache, so that each step runs whole rows again, which is slow: %s", name, problem
    )
    return None


def _cache_problem(hf: PreTrainedModel, kinds: Sequence[Kind], tokens: Tensor, whole: Tensor) -> str:
    """Return why a cache does not serve a model; empty if it does.

    Args:
        hf: Model to probe.
        kinds: Type of the cache layer of each layer of the model.
        tokens: Probe row, `[1, tokens]`.
        whole: Logits of the probe row in one pass.
    """
    cache, parts = RowCache(kinds), []
    try:
        for part in tokens.split((3, *[1] * (tokens.shape[1] - 3)), 1):
            past = cache.get_seq_length()
            places = torch.arange(past, past + part.shape[1], device=hf.device)[None]
            parts.append(hf(input_ids=part, position_ids=places, past_key_values=cache, use_cache=True).logits)
    except _FAMILY_ERRORS as error:
        return f"its code refuses the cache ({type(error).__name__}: {error})"
    is_comparable = has_states(kinds) or whole.dtype == torch.float32
    off = _largest_difference(torch.cat(parts, 1), whole)
    if off <= _tolerance(whole) or not is_comparable:
        return ""
    return f"its code does not compute the same token by token as in one pass (logprobs are off by {off:.2g})"


def decoding_pass(hf: PreTrainedModel, kinds: Sequence[Kind], name: str) -> DecodingPass | None:
    """Return a pass over one token of every row that computes what a model's code does; None if there is none.

    The log shows which of them decodes.
    """
    try:
        problem = pass_problem(hf, kinds)
        found = None if problem else DecodingPass(hf)
    except (*_FAMILY_ERRORS, ConfigError, IndexError) as error:
        problem, found = f"{type(error).__name__}: {error}", None
    _logger.info("%s is decoded by %s", name, f"its code in transformers: {problem}" if problem else "its own pass")
    return found


def _largest_difference(found: Tensor, whole: Tensor) -> float:
    """Return the largest difference of logprobs, given logits."""
    return (found.float().log_softmax(-1) - whole.float().log_softmax(-1)).abs().max().item()


def _tolerance(logits: Tensor) -> float:
    return float(4 * torch.finfo(logits.dtype).eps ** 0.5)


def hf_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the Hugging Face config of the language model, or with `vision.enabled` of the whole model, with the
    overrides; raises `ConfigError` for an unknown override."""
    read = read_composite_config if model.vision.enabled else read_language_config
    try:
        return read(model.model_name, model.hf_config_overrides)
    except ValueError as error:
        raise ConfigError(f"{model.model_name}: {error}") from None


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the `sdpa` function of `transformers`, which with a mask copies keys and values once for
    every head that shares them.

    The heads that share keys are passed as places of one head, if there is one query, so that nothing is copied. All
    other calls go to the function of `transformers`.

    Args:
        module: Attention layer that calls the function.
        query: `[rows, heads, queries, head_dim]`.
        key: `[rows, shared heads, columns, head_dim]`.
        value: Same layout as `key`.
        attention_mask: Boolean or added to the scores, `[rows, 1, queries, columns]`; None for none.
        dropout: Share of the attention weights that is dropped.
        scaling: Scaling of the products; `head_dim ** -0.5` if None.
        **others: Other arguments that the model passes.

    Returns:
        `[rows, queries, heads, head_dim]`.
    """
    rows, heads, queries, head_dim = query.shape
    shared = key.shape[1]
    is_plain = others.get("position_bias") is None and others.get("cache") is None
    has_mask_of_heads = attention_mask is not None and (attention_mask.dim() != 4 or attention_mask.shape[1] != 1)
    if queries > 1 or heads == shared or not is_plain or has_mask_of_heads:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    grouped = query.reshape(rows, shared, heads // shared, head_dim)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None
