"""GRPO as a plugin: its config sections and where its code is."""

from __future__ import annotations

from typing import Any

from rl_algos.data.config import DataConfig, dataset_names
from rl_algos.grpo.checks import check
from rl_algos.grpo.config import GRPOConfig, LossConfig
from rl_algos.requirement import LOSSES
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed


def models(config: Any) -> dict[str, ModelNeed]:
    """The policy trains, and keeps its reference if the loss compares with it."""
    compares = config.loss_fn.reference_policy_kl_penalty > 0
    return {"policy": ModelNeed("policy", ModelSpec(keeps_reference=compares, seed=config.grpo.seed))}


def validation_metrics(config: Any) -> list[str]:
    """What a validation records; nothing where there is none."""
    grpo = config.grpo
    if not (grpo.val_period or grpo.val_at_start or grpo.val_at_end):
        return []
    names = sorted(set(dataset_names(config.data.validation_datasets, "validation")))
    by_dataset = [f"val/{name}/accuracy" for name in names] if len(names) > 1 else []
    return ["val/accuracy", "val/mean_length", *by_dataset]


PLUGIN = AlgorithmPlugin(
    name="grpo",
    sections={"grpo": GRPOConfig, "loss_fn": LossConfig, "data": DataConfig},
    load="rl_algos.grpo.data:load",
    prepare="rl_algos.grpo.setup:prepare",
    run="rl_algos.grpo.setup:run",
    generates=True,
    models=models,
    requirements=(LOSSES,),
    validation_metrics=validation_metrics,
    rollouts="rl_algos.grpo.setup:rollouts",
    checks=(check,),
)
