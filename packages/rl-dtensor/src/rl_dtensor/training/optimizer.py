"""The optimizer over sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import nn
from torch.optim import Optimizer

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.optimizer import build_optimizer, with_fused_step


def build_sharded_optimizer(
    config: OptimizerConfig, groups: Sequence[Sequence[nn.Parameter]], undecayed: Set[nn.Parameter] = frozenset()
) -> Optimizer:
    """Build an optimizer as `build_optimizer` does, for parameters of which the first group are DTensors. The step is
    fused if the optimizer has a fused one for them and the config does not choose.

    Args:
        config: Name and arguments of the optimizer.
        groups: Parameters that the optimizer steps together.
        undecayed: Parameters that are not decayed if `decay_norms_and_biases` is false.

    Raises:
        ValueError: Also if the optimizer's fused step has no implementation for them.
    """
    config = with_fused_step(config, groups[0])
    optimizer = build_optimizer(config, *groups, undecayed=undecayed)
    if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        raise ValueError(
            f"optimizer: the fused step of {config.name} does not run on sharded parameters; leave fused out of "
            "optimizer.kwargs, or use torch.optim.AdamW"
        )
    return optimizer
