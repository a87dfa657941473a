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

from rl_core.facts.optimizer_arguments import OPTIMIZERS
from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from rl_core.torch.files.model_code import run_model_code
from rl_core.torch.files.model_files import CONFIG, read_hf_config
from rl_core.torch.optim.optimizer import build_schedule
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.model.layers.compilation import compiler_problem
from rl_dtensor.parallel.dispatch import deep_ep_buffer
from rl_dtensor.training.step import build_sharded_optimizer


def check(section: Mapping[str, Any]) -> list[str]:
    """Return the problems of a model's section of a resolved config, as text.

    The optimizer and the schedules are built on one parameter; the attention backend and the dispatcher of experts are
    imported.
    """
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
    overrides = section.get("hf_config_overrides", {})
    folder = Path(section.get("model_name") or "").expanduser()
    has_model = section.get("model_name") is not None and (folder / CONFIG).is_file()
    problems = [
        "" if optimizer_config.name in OPTIMIZERS else _step_problem(optimizer_config),
        "",
        compiler_problem() if backend.compile else "",
    ]
    if has_model:
        # The import takes seconds, which models of the hub do not need. The worker checks the heads, because it knows
        # the role of the model.
        from rl_dtensor.model.whole import files_problem

        if trusted := section.get("trust_remote_code"):
            run_model_code(folder, trusted)
        problem = files_problem(folder, overrides, is_whole=section.get("vision", {}).get("enabled", False))
        problems[1] = problem and f"model_name: {problem}"
    found = [problem for problem in problems if problem]
    if found or not has_model or not backend.qat.enabled:
        return found
    from transformers import AutoModelForCausalLM

    from rl_dtensor.model.layers.low_precision import check_rounding
    from rl_dtensor.model.whole import decoder_layers

    # The format of `qat` must fit the layers of a local model.
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(read_hf_config(folder, overrides))
        check_rounding(hf, decoder_layers(hf), backend)
    except ValueError as error:
        return [str(error)]
    return []


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
        # Another failure may come from this machine, such as a kernel that needs a GPU.
        if any(word in str(error) for word in ("DTensor", "placement", "sharding strategy")):
            return f"optimizer: {config.name} cannot step sharded parameters (DTensor): {str(error).splitlines()[0]}"
    finally:
        dist.destroy_process_group()
    return ""
