"""Checks of the config that need vLLM, run in the worker's environment."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rl_core.facts.hf_config import language_fields, with_overrides
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import Placement
from rl_vllm.config import QuantizationConfig, VllmConfig

_log = logging.getLogger(__name__)


def problems(section: Mapping[str, Any]) -> list[str]:
    """Return the problems of a model's section as text: engine arguments that this vLLM does not have, models that it
    does not decode speculatively or whose weights it does not load, and formats of weights and caches that this machine
    has no kernels for."""
    backend = section["generation"]["vllm_cfg"]
    quantization, kv_cache_dtype = backend.get("quantization"), backend.get("kv_cache_dtype", "auto")
    # Every import of vLLM takes seconds, so it is done only for a setting that needs it.
    found = []
    if given := backend["vllm_kwargs"]:
        from vllm import AsyncEngineArgs

        known = [field.name for field in fields(AsyncEngineArgs)]
        for name in (name for name in given if name not in known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            found.append(f"generation.vllm_cfg.vllm_kwargs.{name}: is not an argument of vLLM's engine{hint}")
    if backend.get("speculation") is not None:
        from transformers import PreTrainedConfig

        from rl_vllm.engine.arguments import has_states

        name = section["model_name"]
        stored, _ = PreTrainedConfig.get_config_dict(name)
        if has_states(with_overrides(language_fields(stored), section["hf_config_overrides"])):
            kept = f"states of sequences (Mamba, linear attention), as {name} does"
            reason = f"has not been verified with models that keep {kept}: a draft that is refused must leave no trace"
            found.append(f"generation.vllm_cfg.speculation: {reason} in them. Remove it")
    if quantization is not None or kv_cache_dtype != "auto":
        from rl_vllm.engine.quantisation_kernels import quantisation_problems

        config = None if quantization is None else QuantizationConfig.model_validate(dict(quantization))
        found += [f"generation.vllm_cfg.{problem}" for problem in quantisation_problems(config, kv_cache_dtype)]
    return found or _weights_left_out(section)


def _weights_left_out(section: Mapping[str, Any]) -> list[str]:
    """Compare the headers of a local model's files with the tensors that the engine's model would load.

    The engine repeats this comparison after it has loaded files, and in every weight sync. So a model that cannot be
    built here, such as one that needs several ranks, is left to them.
    """
    if not Path(section.get("model_name", ""), "config.json").is_file():
        return []
    model = ModelConfig.model_validate({name: section[name] for name in ModelConfig.model_fields if name in section})
    backend = VllmConfig.model_validate(section["generation"]["vllm_cfg"])
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Importing the worker corrects vLLM's models as in the engine's processes.
    import rl_vllm.engine_worker  # noqa: F401
    from rl_vllm.engine.arguments import engine_arguments
    from rl_vllm.generator import VllmGenerator
    from rl_vllm.weights.file_weights import FileWeights
    from rl_vllm.weights.load_plan import plan_load

    extension = VllmGenerator.worker_extension
    placement = Placement("cuda" if torch.cuda.is_available() else "cpu", awaits_weights=True)
    longest = backend.max_model_len or model.max_total_sequence_length
    try:
        weights = FileWeights.of(model, as_sent=True)
        arguments = engine_arguments(VllmConfig(), model, placement, max_len=longest, eager=True, extension=extension)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), _one_rank():
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                engine_model = initialize_model(vllm_config=config)
            plan = plan_load(engine_model, weights.manifest)
    except Exception as error:  # noqa: BLE001 - the engine itself reports what keeps it from starting
        _log.info("the weights of %s are compared when the engine starts: %s", model.model_name, error)
        return []
    missing = () if weights.is_quantised else plan.missing
    problem = weights.problem(plan.unknown, missing)
    return [f"model_name: {problem}"] if problem else []


@contextmanager
def _one_rank() -> Iterator[None]:
    """Give layers the process groups that they look up when they are built."""
    from vllm import distributed

    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        distributed.init_distributed_environment(1, 0, local_rank=0, backend="gloo", distributed_init_method=meeting)
        distributed.ensure_model_parallel_initialized(1, 1, backend="gloo")
        try:
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
