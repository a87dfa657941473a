"""The optimizer over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optimizer import build_optimizer


def build_sharded_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """As `build_optimizer`, for parameters that are DTensors.

    Raises:
        ValueError: also where the optimizer's fused step has no implementation for them.
    """
    optimizer = build_optimizer(config, parameters)
    if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        raise ValueError(
            f"policy.optimizer: the fused step of {config.name} does not run on sharded parameters; leave fused out of "
            "policy.optimizer.kwargs, or use torch.optim.AdamW"
        )
    return optimizer
