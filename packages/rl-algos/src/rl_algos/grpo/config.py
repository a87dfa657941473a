"""Settings of the GRPO loop."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rl_algos.grpo.loss_config import CustomLossConfig, LossConfig
from rl_algos.rollouts.config import PolicyGradientConfig, RolloutRoot
from rl_core.config import NamedConfig


class EstimatorConfig(NamedConfig):
    """How rewards become advantages; the keys beside `name` are the settings of that estimator."""

    name: str | None = None
    """`grpo`, `grpo_batch_std`, `drgrpo`, `rloo`, `reinforce`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`,
    `gpg`, `opo`, `remax`, `pass_at_k`, `maxrl`, `gdpo`, `optimal_token_baseline`, or a function of yours as
    `package.module:function` or `file.py:function`. Unset, it is `rloo` with `use_leave_one_out_baseline` and `grpo`
    without it."""


class GRPOConfig(PolicyGradientConfig):
    """GRPO and its family: steps, prompts and samples of a step, advantages, validation."""

    section: ClassVar[str] = "grpo"

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group (`grpo`, `rloo`)."""
    use_leave_one_out_baseline: bool = False
    """Compare each reward with the mean of the others in its group instead of the mean of all."""
    adv_estimator: EstimatorConfig = EstimatorConfig()


class ObjectiveRoot(RolloutRoot, Protocol):
    """The resolved config of a run whose policy minimises `loss_fn`."""

    @property
    def loss_fn(self) -> LossConfig | CustomLossConfig:
        """Settings of the loss."""
        ...


class GRPORoot(ObjectiveRoot, Protocol):
    """The resolved config of a GRPO run, as far as GRPO reads it."""

    @property
    def grpo(self) -> GRPOConfig:
        """Settings of the loop."""
        ...
