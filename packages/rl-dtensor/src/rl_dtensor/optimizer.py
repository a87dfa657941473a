"""The optimizer over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optimizer import build_optimizer

FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
"""Optimizers whose fused step takes DTensors; without it every operation on every parameter is dispatched to them on
its own, which takes longer than the arithmetic of small models.
"""

WAYS_TO_STEP = {"fused", "foreach", "differentiable"}
"""Arguments by which a config chooses for itself how an optimizer steps."""


def build_sharded_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """As `build_optimizer`, for parameters that are DTensors; with a fused step where the optimizer has one for them
    and the config does not choose.

    Raises:
        ValueError: also where the optimizer's fused step has no implementation for them.
    """
    parameters = list(parameters)
    if config.name in FUSED and not WAYS_TO_STEP & set(config.kwargs) and _share_a_mesh(parameters):
        config = config.model_copy(update={"kwargs": {**config.kwargs, "fused": True}})
    optimizer = build_optimizer(config, parameters)
    if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        raise ValueError(
            f"policy.optimizer: the fused step of {config.name} does not run on sharded parameters; leave fused out of "
            "policy.optimizer.kwargs, or use torch.optim.AdamW"
        )
    return optimizer


def _share_a_mesh(parameters: list[nn.Parameter]) -> bool:
    """Whether one operation can take all of them: experts are sharded over a mesh of their own."""
    meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}
    return len(meshes) == 1 and None not in meshes
