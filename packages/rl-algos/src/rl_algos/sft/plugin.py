"""Supervised fine-tuning as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.data.config import DataConfig
from rl_algos.requirement import LOSSES
from rl_algos.sft.config import SFTConfig, SFTRoot
from rl_algos.supervised.checks import supervised_problems
from rl_algos.supervised.config import validation_metrics as metrics_of
from rl_core.config import Problem
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed


def check(config: SFTRoot) -> Iterator[Problem]:
    """Problems of the whole resolved config."""
    yield from supervised_problems("sft", config.sft, config.data, config.policy)
    yield from _mixture(config)


def _mixture(config: SFTRoot) -> Iterator[Problem]:
    """Find a unit of weights without weights."""
    weights = [dataset.weight for dataset in config.data.train_datasets]
    if config.sft.mix_by != "rows" and (None in weights or len(weights) == 1):
        yield Problem(
            "sft.mix_by", "there are no weights to mix by; give each of several datasets in data.train a `weight`"
        )


def validation_metrics(config: SFTRoot) -> list[str]:
    """Metrics that a validation records; none if there is no validation."""
    return metrics_of(config.sft, config.data, ("loss", "num_tokens"))


def models(config: SFTRoot) -> dict[str, ModelNeed]:
    """The policy trains and needs no reference."""
    return {"policy": ModelNeed("policy", ModelSpec(seed=config.sft.seed))}


PLUGIN = AlgorithmPlugin(
    name="sft",
    sections={"sft": SFTConfig, "data": DataConfig},
    load="rl_algos.data.examples:load",
    prepare="rl_algos.sft.data:prepare",
    run="rl_algos.sft.loop:run",
    generates=False,
    models=models,
    requirements=(LOSSES,),
    validation_metrics=validation_metrics,
    checks=(check,),
)
