"""Checks that need the worker's environment but no model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from rl_core.torch.optim.optimizer import build_optimizer, build_schedule


def check(section: Mapping[str, Any]) -> list[str]:
    """Problems of a model's section of a resolved config, as text: the optimizer and the schedules are built on one
    parameter."""
    fields = ModelConfig.model_fields
    optimizer_config = OptimizerConfig.model_validate(section.get("optimizer", fields["optimizer"].default))
    schedules = [SchedulerConfig.model_validate(entry) for entry in section.get("scheduler", [])]
    try:
        optimizer = build_optimizer(optimizer_config, [torch.nn.Parameter(torch.zeros(1))])
        build_schedule(schedules, optimizer)
    except ValueError as error:
        return [str(error)]
    is_8_bit = section.get("megatron_cfg", {}).get("fp8_cfg", {}).get("enabled", False)
    if is_8_bit and importlib.util.find_spec("transformer_engine") is None:
        return ["megatron_cfg.fp8_cfg.enabled needs Transformer Engine, which is not installed: rl-megatron[te]"]
    return []
