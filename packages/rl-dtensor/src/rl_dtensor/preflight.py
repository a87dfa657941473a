"""Checks that need the worker's environment but no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
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
        compiler_problem() if backend.compile else "",
        import_problem() if backend.float8.enabled else "",
    )
    return [problem for problem in problems if problem]
