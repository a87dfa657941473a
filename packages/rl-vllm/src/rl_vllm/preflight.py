"""Checks of the config that need vLLM, run in the worker's environment."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rl_core.hf_config import with_overrides
from rl_core.model_config import ModelConfig, language_fields
from rl_core.rollouts.generation import Placement
from rl_vllm.config import VllmConfig

_log = logging.getLogger(__name__)


def problems(section: Mapping[str, Any]) -> list[str]:
    """Return the engine arguments that this vLLM does not have, models that it is not to decode speculatively or whose
    weights it does not load, and formats of weights and caches that this machine has no kernels for."""
    backend = section["generation"]["vllm_cfg"]
    found = [
        *_unknown_arguments(backend["vllm_kwargs"]),
        *_states_with_drafts(section, backend.get("speculation")),
        *_formats_without_kernels(backend.get("quantization"), backend.get("kv_cache_dtype", "auto")),
    ]
    return found or _weights_left_out(section)


def _weights_left_out(section: Mapping[str, Any]) -> list[str]:
    """Compare the headers of a local model's files with what the engine's model would load.

    The engine repeats this comparison after it has loaded files, and in every weight sync. So a model that cannot be
    built here, such as one that needs several ranks, is left to them.
    """
    if not Path(section.get("model_name", ""), "config.json").is_file():
        return []
    model = ModelConfig.model_validate({name: section[name] for name in ModelConfig.model_fields if name in section})
    backend = VllmConfig.model_validate(section["generation"]["vllm_cfg"])
    # vLLM takes seconds to import
    from rl_vllm.empty_model import plan_without_weights
    from rl_vllm.engine.arguments import engine_arguments
    from rl_vllm.generator import VllmGenerator
    from rl_vllm.weights.file_weights import FileWeights

    extension = VllmGenerator.worker_extension
    placement = Placement("cuda" if torch.cuda.is_available() else "cpu", awaits_weights=True)
    longest = backend.max_model_len or model.max_total_sequence_length
    try:
        weights = FileWeights.of(model, as_sent=True)
        arguments = engine_arguments(VllmConfig(), model, placement, max_len=longest, eager=True, extension=extension)
        plan = plan_without_weights(arguments, weights.manifest)
    except Exception as error:  # noqa: BLE001 - the engine itself reports what keeps it from starting
        _log.info("the weights of %s are compared when the engine starts: %s", model.model_name, error)
        return []
    missing = () if weights.is_quantised else plan.missing
    problem = weights.problem(plan.unknown, missing)
    return [f"model_name: {problem}"] if problem else []


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
