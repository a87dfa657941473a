"""Checks of the config that need vLLM, run in the worker's environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rl_core.hf_config import with_overrides
from rl_core.model_config import language_fields


def problems(section: Mapping[str, Any]) -> list[str]:
    """Engine arguments that this vLLM does not have, models that it is not to decode speculatively, and formats of
    weights and caches that this machine has no kernels for."""
    backend = section["generation"]["vllm_cfg"]
    return [
        *_unknown_arguments(backend["vllm_kwargs"]),
        *_states_with_drafts(section, backend.get("speculation")),
        *_formats_without_kernels(backend.get("quantization"), backend.get("kv_cache_dtype", "auto")),
    ]


def _formats_without_kernels(quantization: Mapping[str, Any] | None, kv_cache_dtype: str) -> list[str]:
    if quantization is None and kv_cache_dtype == "auto":
        return []
    from rl_vllm.engine.quantisation_kernels import quantisation_problems
    from rl_vllm.quantization_config import QuantizationConfig

    config = None if quantization is None else QuantizationConfig.model_validate(dict(quantization))
    return [f"generation.vllm_cfg.{problem}" for problem in quantisation_problems(config, kv_cache_dtype)]


def _states_with_drafts(section: Mapping[str, Any], speculation: Mapping[str, Any] | None) -> list[str]:
    if speculation is None:
        return []
    from transformers import PreTrainedConfig

    from rl_vllm.engine.arguments import has_states

    stored, _ = PreTrainedConfig.get_config_dict(section["model_name"])
    if not has_states(with_overrides(language_fields(stored), section["hf_config_overrides"])):
        return []
    reason = (
        f"has not been verified with models that keep states of sequences (Mamba, linear attention), as "
        f"{section['model_name']} does: a draft that is refused must leave no trace in them. Remove it"
    )
    return [f"generation.vllm_cfg.speculation: {reason}"]


def _unknown_arguments(given: Mapping[str, Any]) -> list[str]:
    if not given:
        return []
    from vllm import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs)]
    found = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            found.append(f"generation.vllm_cfg.vllm_kwargs.{name}: is not an argument of vLLM's engine{hint}")
    return found
