"""Checks that need the worker's environment but no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from rl_core.optimizer_arguments import OPTIMIZERS
from rl_core.torch.files.model_files import CONFIG, read_hf_config
from rl_core.torch.optim.optimizer import build_schedule
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.compilation import compiler_problem
from rl_dtensor.model.float8 import import_problem
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.parallel.deep_ep import deep_ep_buffer
from rl_dtensor.training.optimizer import build_sharded_optimizer


def check(section: Mapping[str, Any]) -> list[str]:
    """Problems of a model's section of a resolved config, as text: the optimizer and the schedules are built on one
    parameter; the attention backend, the dispatcher of experts and float8 are imported."""
    fields = ModelConfig.model_fields
    optimizer_config = OptimizerConfig.model_validate(section.get("optimizer", fields["optimizer"].default))
    schedules = [SchedulerConfig.model_validate(entry) for entry in section.get("scheduler", [])]
    backend = DTensorConfig.model_validate(section.get("dtensor_cfg", {}))
    try:
        kernel_of(backend.attention_backend)
        if backend.expert_dispatcher == "deep_ep":
            deep_ep_buffer()
        optimizer = build_sharded_optimizer(optimizer_config, [[torch.nn.Parameter(torch.zeros(1))]])
        build_schedule(schedules, optimizer)
    except ValueError as error:
        return [str(error)]
    problems = (
        "" if optimizer_config.name in OPTIMIZERS else _step_problem(optimizer_config),
        _model_problem(section),
        compiler_problem() if backend.compile else "",
        import_problem() if backend.float8.enabled else "",
    )
    return [problem for problem in problems if problem] or _rounding_problems(section, backend)


def _rounding_problems(section: Mapping[str, Any], backend: DTensorConfig) -> list[str]:
    """Return the layers of a local model that the format of `qat` does not fit."""
    folder = Path(section.get("model_name", "")).expanduser()
    if not backend.qat.enabled or not (folder / CONFIG).is_file():
        return []
    # transformers' models take seconds to import
    from transformers import AutoModelForCausalLM

    from rl_dtensor.model.build import decoder_layers
    from rl_dtensor.model.qat import check_rounding

    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(read_hf_config(folder, section.get("hf_config_overrides", {})))
        check_rounding(hf, decoder_layers(hf), backend)
    except ValueError as error:
        return [str(error)]
    return []


def _model_problem(section: Mapping[str, Any]) -> str:
    """Return why a model in a local folder is not one that can be trained, or its files do not have its weights; empty
    if they do. Heads are left to the worker, which knows the role of the model."""
    # takes seconds, which models of the hub do not pay
    from rl_dtensor.model.files_check import files_problem

    name = section.get("model_name")
    if name is None or not (folder := Path(name).expanduser()).joinpath(CONFIG).is_file():
        return ""
    is_whole = section.get("vision", {}).get("enabled", False)
    problem = files_problem(folder, section.get("hf_config_overrides", {}), is_whole=is_whole)
    return problem and f"model_name: {problem}"


def _step_problem(config: OptimizerConfig) -> str:
    """Return why an optimizer of another package cannot step sharded parameters, by a step on one rank; empty if
    DTensor supports it."""
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameters = [torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh)) for shape in ((4, 4), (4,))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        build_sharded_optimizer(config, [parameters]).step()
    except (RuntimeError, NotImplementedError) as error:
        # Another failure may be one of this machine, such as a kernel that needs a GPU.
        if any(word in str(error) for word in ("DTensor", "placement", "sharding strategy")):
            return f"optimizer: {config.name} cannot step sharded parameters (DTensor): {str(error).splitlines()[0]}"
    finally:
        dist.destroy_process_group()
    return ""
