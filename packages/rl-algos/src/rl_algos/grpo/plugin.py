"""GRPO as a plugin: its config sections and where its code is."""

from __future__ import annotations

from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.grpo.checks import check
from rl_algos.grpo.config import GRPOConfig, LossConfig
from rl_core.model import ModelSpec
from rl_core.registry import AlgorithmPlugin


def policy_spec(config: Any) -> ModelSpec:
    """What the policy is for: it trains, and keeps its reference where the loss compares with it."""
    return ModelSpec(
        role="policy",
        trains=True,
        keeps_reference=config.loss_fn.reference_policy_kl_penalty > 0,
        seed=config.grpo.seed,
    )


PLUGIN = AlgorithmPlugin(
    name="grpo",
    sections={"grpo": GRPOConfig, "loss_fn": LossConfig, "data": DataConfig},
    prepare="rl_algos.grpo.setup:prepare",
    run="rl_algos.grpo.setup:run",
    generates=True,
    spec=policy_spec,
    rollouts="rl_algos.grpo.setup:rollouts",
    checks=(check,),
)
