"""Supervised fine-tuning as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.sft.config import SFTConfig, SFTRoot
from rl_algos.supervised.config import validation_metrics as metrics_of
from rl_algos.supervised.plugin import supervised_algorithm
from rl_core.config import Problem
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults


def check(config: SFTRoot) -> Iterator[Problem]:
    """Yield a unit of weights without weights."""
    weights = [dataset.weight for dataset in config.data.train_datasets]
    if config.sft.mix_by != "rows" and (None in weights or len(weights) == 1):
        reason, remedy = "needs several datasets with a `weight` each", "Set `weight` for every dataset in data.train"
        yield Problem("sft.mix_by", reason, got=config.sft.mix_by, remedy=remedy)


def validation_metrics(config: SFTRoot) -> list[str]:
    """Return the metrics that a validation records; none if there is no validation."""
    return metrics_of(config.sft, config.data, ("loss", "num_tokens"))


def models(config: SFTRoot) -> dict[str, ModelNeed]:
    """Return the policy, which trains and needs no reference."""
    return {"policy": ModelNeed("policy", ModelSpec(seed=config.sft.seed))}


PLUGIN = supervised_algorithm(
    "sft",
    sections={"sft": SFTConfig},
    implementation="rl_algos.sft.algorithm:SFT",
    models=models,
    validation_metrics=validation_metrics,
    training_defaults=TrainingDefaults(lr=2e-5, adapter_lr=2e-4, rows=64),
    checks=(check,),
    scores_tasks=True,
)
