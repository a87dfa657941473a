"""Checks that need the worker's environment but no model."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rl_core.config import Problem, did_you_mean
from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from rl_core.torch.files.model_files import CONFIG
from rl_core.torch.optim.optimizer import build_optimizer, build_schedule
from rl_megatron.config import Fp8Config, MegatronConfig
from rl_megatron.engine_names import name_problems
from rl_megatron.transformer_fields import FUSIONS, MODEL_REASON, PASSED, WITH_TE, refusal

NO_DEEP_EP = (
    "megatron_cfg.moe_token_dispatcher_type=flex needs DeepEP, which is not installed, and no package has it: build it "
    "from the DeepEP repository in the environment that this run is started from, together with rl-megatron[te], with "
    "cluster.worker_envs=shared; or set alltoall"
)
"""Problem of a dispatcher that no environment built for workers has."""

CAPABILITIES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Lowest compute capability that a recipe of Transformer Engine runs on."""


def check(section: Mapping[str, Any]) -> list[str]:
    """Return the problems of a model's section of a resolved config, as text.

    The optimizer and the schedules are built on one parameter. On GPUs, Transformer Engine must have the names that
    Megatron's layers are built on.
    """
    fields = ModelConfig.model_fields
    optimizer_config = OptimizerConfig.model_validate(section.get("optimizer", fields["optimizer"].default))
    schedules = [SchedulerConfig.model_validate(entry) for entry in section.get("scheduler", [])]
    try:
        optimizer = build_optimizer(optimizer_config, [torch.nn.Parameter(torch.zeros(1))])
        build_schedule(schedules, optimizer)
    except ValueError as error:
        return [str(error)]
    backend = section.get("megatron_cfg", {})
    is_8_bit = backend.get("fp8_cfg", {}).get("enabled", False)
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if is_8_bit and not has_te:
        return ["megatron_cfg.fp8_cfg.enabled needs Transformer Engine, which is not installed: rl-megatron[te]"]
    if is_8_bit and torch.cuda.is_available():
        recipe = Fp8Config.model_validate(backend["fp8_cfg"]).fp8_recipe
        if problem := capability_problem(recipe, torch.cuda.get_device_capability()):
            return [problem]
    if backend.get("moe_token_dispatcher_type") == "flex" and importlib.util.find_spec("deep_ep") is None:
        return [NO_DEEP_EP]
    given = backend.get("megatron_kwargs", {})
    problems = list(kwargs_problems(given, has_te=has_te)) if given else []
    has_adapters = section.get("lora_cfg", {}).get("enabled", False)
    if has_te and backend.get("transformer_engine") is not False and not has_adapters and torch.cuda.is_available():
        problems += name_problems(given)
    folder = Path(section.get("model_name", "")).expanduser()
    # Workers themselves find the problems of a model on the hub.
    if problems or not (folder / CONFIG).is_file():
        return problems
    from rl_megatron.model.build import check_design  # takes seconds

    config = ModelConfig.model_validate({name: section[name] for name in fields if name in section})
    try:
        check_design(config, MegatronConfig.model_validate(backend), folder, is_cuda=torch.cuda.is_available())
    except ValueError as error:
        return [str(error)]
    return []


def capability_problem(recipe: str, found: tuple[int, int]) -> str:
    """Return why GPUs of a compute capability do not run a recipe of 8-bit products; empty if they do."""
    least = CAPABILITIES[recipe]
    if found >= least:
        return ""
    possible = [name for name, capability in CAPABILITIES.items() if found >= capability]
    remedy = f"set it to {' or '.join(possible)}" if possible else "set megatron_cfg.fp8_cfg.enabled=false"
    return (
        f"megatron_cfg.fp8_cfg.fp8_recipe={recipe} needs GPUs of compute capability {least[0]}.{least[1]} or higher, "
        f"and this one has {found[0]}.{found[1]}; {remedy}"
    )


def kwargs_problems(given: Mapping[str, Any], *, has_te: bool) -> Iterator[str]:
    """Yield the problems of `megatron_kwargs` with the installed Megatron: names, types, and layers that it lacks.

    Args:
        given: Values by the name of Megatron's field.
        has_te: True if Transformer Engine is installed.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig  # takes seconds

    fields = [field.name for field in dataclasses.fields(MLATransformerConfig)]
    kinds = get_type_hints(MLATransformerConfig)
    for name, value in given.items():
        key = f"megatron_cfg.megatron_kwargs.{name}"
        if name not in fields:
            reason = f"is not a field of Megatron's TransformerConfig{did_you_mean(name, fields)}"
            yield f"{key}: {Problem('', reason).message}"
        elif name not in PASSED:
            yield f"{key}: {refusal(name, MODEL_REASON).message}"
        elif name in WITH_TE and not has_te and not (name in FUSIONS and value is False):
            yield f"{key} needs Transformer Engine, which is not installed: rl-megatron[te]"
        elif isinstance(kinds[name], type) and issubclass(kinds[name], Enum):
            names = [member.name for member in kinds[name]]
            if value not in names:
                yield f"{key}: got {value!r}; allowed: {', '.join(names)}"
        else:
            kind = TypeAdapter(kinds[name], config=ConfigDict(arbitrary_types_allowed=True, strict=True))
            try:
                kind.validate_python(value)
            except ValidationError as error:
                yield f"{key}: got {value!r}; {error.errors()[0]['msg']}"
