"""Reward models as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.preference.config import preference_data_problems
from rl_algos.reward_model.config import RewardModelConfig, RewardModelRoot
from rl_algos.supervised.config import validation_metrics as metrics_of
from rl_algos.supervised.plugin import supervised_algorithm
from rl_core.config import Problem, is_changed
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults

_OF_PAIRS = ("accuracy", "loss", "margin", "num_pairs", "reward_chosen", "reward_rejected")
_OF_RESPONSES = ("loss", "num_responses", "score", "target")
_OF_STEPS = ("accuracy", "loss", "num_steps", "score", "target")


def check(config: RewardModelRoot) -> Iterator[Problem]:
    """Yield problems of the whole resolved config, in addition to problems of every algorithm with given rows."""
    yield from preference_data_problems("rm", config.data)
    rm = config.rm
    if rm.loss != "process" and is_changed(rm, "step_end"):
        yield Problem.unused("rm.step_end", f"with rm.loss={rm.loss}, which does not use steps")
    if rm.loss != "regression" and rm.score_weights:
        yield Problem.unused("rm.score_weights", f"with rm.loss={rm.loss}, which does not use scores")
    if rm.loss == "bradley-terry":
        return
    # Other losses learn from single responses, so keys of pairs have no effect.
    pairs = {"margin": "ignore", "center_rewards_coefficient": 0.0, "pairing": "best-worst"}
    for key, unused in pairs.items():
        if getattr(rm, key) != unused:
            yield Problem.unused(f"rm.{key}", f"with rm.loss={rm.loss}, which does not use pairs")


def validation_metrics(config: RewardModelRoot) -> list[str]:
    """Return the metrics that a validation records; none if there is no validation."""
    reported = {"regression": _OF_RESPONSES, "process": _OF_STEPS}
    return metrics_of(config.rm, config.data, reported.get(config.rm.loss, _OF_PAIRS))


def models(config: RewardModelRoot) -> dict[str, ModelNeed]:
    """Return the reward model, in the role `policy` of the model that is exported."""
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
