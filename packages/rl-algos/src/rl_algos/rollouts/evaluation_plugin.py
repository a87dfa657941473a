"""The evaluation of a model without a run, as a plugin."""

from __future__ import annotations

from typing import Any

from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.rollouts.checks import evaluation_problems
from rl_core.plugins import AlgorithmPlugin, ModelNeed


def no_models(config: Any) -> dict[str, ModelNeed]:
    """It trains nothing."""
    return {}


PLUGIN = AlgorithmPlugin(
    name="evaluation",
    sections={"eval": EvaluationConfig},
    load="",
    prepare="",
    run="",
    generates=True,
    models=no_models,
    evaluate="rl_algos.rollouts.evaluation:RolloutEvaluation",
    checks=(evaluation_problems,),
)
