"""Rotary frequencies as Hugging Face computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_core.facts.hf_config import HFConfig
from rl_megatron.families.supported import rope_problem


def inverse_frequencies(config: HFConfig, dim: int, kind_of_layer: str | None = None) -> Tensor:
    """Return float32 `[dim / 2]`.

    Args:
        config: Hugging Face config of a model without latent attention.
        dim: Dims of a head that are rotated.
        kind_of_layer: Kind among the config's `layer_types` whose parameters to use; None if all layers have the same.

    Raises:
        ValueError: For a rotary embedding that Megatron's layers do not compute.
    """
    _check_rope(config)
    parameters = config.rope_parameters if kind_of_layer is None else config.rope_parameters[kind_of_layer]
    kind = parameters["rope_type"]
    if kind == "default":
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    given = {} if kind_of_layer is None else {"layer_type": kind_of_layer}
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **given)
    if 2 * len(frequencies) != dim:
        raise ValueError(
            f"rotary embedding of type {kind!r} has {len(frequencies)} frequencies for {dim} dims of a "
            f"{config.model_type} model; correct partial_rotary_factor in hf_config_overrides"
        )
    return frequencies


def scaling_fields(config: HFConfig) -> Mapping[str, float]:
    """Return the fields of Megatron's config that make attention scale cosines and sines; empty if it does not.

    Args:
        config: Hugging Face config of a model without latent attention.
    """
    rope = config.rope_parameters
    # Types that scale are refused if layers differ.
    if rope.get("rope_type") != "yarn":
        return {}
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    factor = rope["factor"]
    mscale = _mscale(attention_factor, factor, 0.0)
    return {"yarn_rotary_scaling_factor": factor, "yarn_mscale": mscale, "yarn_mscale_all_dim": 0.0}


def latent_settings(config: HFConfig) -> Mapping[str, Any]:
    """Return the fields of `MLATransformerConfig` for the rotary embedding, which latent attention makes itself.

    Raises:
        ValueError: For one that Megatron's layers do not compute.
    """
    _check_rope(config)
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        # Megatron defaults to a scaling of 40.
        plain = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        return {**plain, "rotary_base": rope["rope_theta"]}
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    all_dim = rope.get("mscale_all_dim") or 0.0
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": _mscale(attention_factor, rope["factor"], all_dim),
        "mscale_all_dim": all_dim,
    }


def _check_rope(config: HFConfig) -> None:
    problem = rope_problem(config.to_dict())
    if problem:
        raise ValueError(f"model_name: {problem.message}")


def _mscale(attention_factor: float, factor: float, all_dim: float) -> float:
    """Return the `mscale` that makes Megatron scale cosines and sines by `attention_factor`.

    Megatron scales them by `(0.1 mscale log(factor) + 1) / (0.1 all_dim log(factor) + 1)` (Peng et al., "YaRN", 2023),
    where transformers ignores one of the two without the other, and prefers an explicit `attention_factor`.
    """
    slope = 0.1 * math.log(factor)
    return (attention_factor * (slope * all_dim + 1) - 1) / slope
