"""The config of a run whose policy minimises `loss_fn`."""

from __future__ import annotations

from typing import Protocol

from rl_algos.policy_gradient.loss_config import CustomLossConfig, LossConfig
from rl_algos.rollouts.config import RolloutRoot


class ObjectiveRoot(RolloutRoot, Protocol):
    """The resolved config of a run whose policy minimises `loss_fn`."""

    @property
    def loss_fn(self) -> LossConfig | CustomLossConfig:
        """Settings of the loss."""
        ...
