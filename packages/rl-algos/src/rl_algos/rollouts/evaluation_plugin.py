"""The evaluation of a model without a run, as a plugin."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.rollouts.checks import evaluation_problems
from rl_algos.rollouts.config import EvaluationRoot
from rl_core.config import Problem
from rl_core.plugins import AlgorithmPlugin, ModelNeed


def no_models(config: object) -> dict[str, ModelNeed]:
    """It trains nothing."""
    return {}


def training_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Keys that are for runs that train."""
    for key in ("period", "at_start", "at_end"):
        if getattr(config.eval, key):
            yield Problem.unused(f"eval.{key}", "because this run does not train")


PLUGIN = AlgorithmPlugin(
    name="evaluation",
    sections={"eval": EvaluationConfig},
    implementation="rl_algos.rollouts.algorithm:EvaluationOnly",
    generates=True,
    trains=False,
    evaluates=True,
    models=no_models,
    checks=(evaluation_problems, training_problems),
)
