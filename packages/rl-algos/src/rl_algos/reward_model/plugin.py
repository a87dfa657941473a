"""Reward models as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rl_algos.preference.checks import preference_data_problems
from rl_algos.reward_model.config import RewardModelConfig, RewardModelRoot
from rl_algos.supervised.config import validation_metrics as metrics_of
from rl_algos.supervised.plugin import supervised_algorithm
from rl_core.config import Problem
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults

_OF_PAIRS = ("accuracy", "loss", "margin", "num_pairs", "reward_chosen", "reward_rejected")
_OF_RESPONSES = ("loss", "num_responses", "score", "target")


def check(config: RewardModelRoot) -> Iterable[Problem]:
    """Yield problems of the whole resolved config, in addition to those of every algorithm with given rows."""
    yield from preference_data_problems("rm", config.data)
    yield from _regression(config.rm)


def _regression(rm: RewardModelConfig) -> Iterator[Problem]:
    """Settings of pairs, which regression has none of."""
    if rm.loss != "regression":
        return
    pairs = {"margin": "ignore", "center_rewards_coefficient": 0.0, "pairing": "best-worst"}
    for key, unused in pairs.items():
        if getattr(rm, key) != unused:
            yield Problem.unused(f"rm.{key}", "with rm.loss=regression, which does not use pairs")


def validation_metrics(config: RewardModelRoot) -> list[str]:
    """Metrics that a validation records; none if there is no validation."""
    return metrics_of(config.rm, config.data, _OF_RESPONSES if config.rm.loss == "regression" else _OF_PAIRS)


def models(config: RewardModelRoot) -> dict[str, ModelNeed]:
    """The role `policy` is the model that is exported: here the reward model."""
    return {"policy": ModelNeed("policy", ModelSpec(role="reward_model", seed=config.rm.seed))}


PLUGIN = supervised_algorithm(
    "rm",
    sections={"rm": RewardModelConfig},
    implementation="rl_algos.reward_model.algorithm:RewardModel",
    models=models,
    validation_metrics=validation_metrics,
    training_defaults=TrainingDefaults(lr=5e-6, adapter_lr=5e-5, rows=64),
    checks=(check,),
)
