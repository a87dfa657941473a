"""The optimizer over sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.optimizer import WAYS_TO_STEP, build_optimizer

FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
"""Optimizers whose fused step takes DTensors; without it every operation on every parameter is dispatched to them on
its own, which takes longer than the arithmetic of small models.
"""


def build_sharded_optimizer(config: OptimizerConfig, groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Build an optimizer as `build_optimizer` does, for parameters of which the first group are DTensors. The step is
    fused if the optimizer has a fused one for them and the config does not choose.

    Args:
        config: Name and arguments of the optimizer.
        groups: Parameters that the optimizer steps together, all with the same settings.

    Raises:
        ValueError: Also if the optimizer's fused step has no implementation for them.
    """
    if config.name in FUSED and not WAYS_TO_STEP & set(config.kwargs) and _are_sharded(groups[0]):
        config = config.model_copy(update={"kwargs": {**config.kwargs, "fused": True}})
    optimizer = build_optimizer(config, groups[0] if len(groups) == 1 else [{"params": list(each)} for each in groups])
    if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        raise ValueError(
            f"optimizer: the fused step of {config.name} does not run on sharded parameters; leave fused out of "
            "optimizer.kwargs, or use torch.optim.AdamW"
        )
    return optimizer


def _are_sharded(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether all are DTensors, over whatever meshes: experts are sharded over one of their own."""
    return all(isinstance(parameter, DTensor) for parameter in parameters)
