"""The plugin of an algorithm that trains on its own rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.requirement import LOSSES
from rl_algos.rollouts.checks import (
    WITHOUT_VALIDATION,
    evaluation_problems,
    rollout_problems,
    task_problems,
    validation_metrics,
    whole_distribution,
)
from rl_algos.rollouts.drafter import (
    ModelSections,
    defaults_with_drafter,
    drafter_need,
    drafter_problems,
    sections_with_drafter,
)
from rl_core.config import Config, Problem
from rl_core.plugins import (
    AlgorithmPlugin,
    ModelNeed,
    Requirement,
    TrainingDefaults,
    WrittenValues,
    no_defaults,
    no_models,
    nothing_further,
)


def rollout_algorithm(
    name: str,
    *,
    sections: Mapping[str, type[Config] | Callable[[Any], type[Config]]],
    implementation: str,
    models: Callable[[Any], Mapping[str, ModelNeed]],
    training_defaults: Callable[[WrittenValues], Mapping[str, TrainingDefaults]] = no_defaults,
    model_sections: ModelSections = ("policy",),
    requirements: tuple[Requirement, ...] = (),
    further: Callable[[Any], tuple[Requirement, ...]] = nothing_further,
    reads_filtered: bool = False,
    checks: tuple[Callable[[Any], Iterable[Problem]], ...] = (),
    further_models: Callable[[Any], Mapping[str, str]] = no_models,
) -> AlgorithmPlugin:
    """A plugin that loads prompts, rolls them out with `MultiTurnProgram`, validates and evaluates as all such
    algorithms do.

    Args:
        name: Name of the algorithm.
        sections: Sections of the config except `data`; the first extends `rl_algos.rollouts.config.RolloutConfig`.
        implementation: A `rl_algos.rollouts.algorithm.RolloutAlgorithm`.
        models: See `AlgorithmPlugin`.
        training_defaults: See `AlgorithmPlugin`.
        model_sections: See `AlgorithmPlugin`.
        requirements: Requirements in addition to rl-algos itself.
        further: See `AlgorithmPlugin`.
        reads_filtered: True if its loss reads logprobs of the tokens that `top_p`, `top_k` and `min_p` of generation
            keep (`Read.token_filter`); otherwise these are refused.
        checks: Checks in addition to those of rollouts, validation and environments.
        further_models: See `AlgorithmPlugin`.
    """
    key = next(iter(sections), name)
    return AlgorithmPlugin(
        name=name,
        sections={**sections, "data": DataConfig, "eval": EvaluationConfig},
        implementation=implementation,
        generates=True,
        evaluates=True,
        models=lambda config: {**models(config), **drafter_need(config)},
        model_sections=sections_with_drafter(model_sections),
        training_defaults=defaults_with_drafter(training_defaults),
        requirements=(LOSSES, *requirements),
        further=further,
        validation_metrics=validation_metrics,
        without_validation={f"{key}.{asked}": value for asked, value in WITHOUT_VALIDATION.items()},
        evaluates_in_training=lambda config: config.eval.in_training,
        checks=(
            rollout_problems,
            evaluation_problems,
            task_problems,
            drafter_problems,
            *(() if reads_filtered else (whole_distribution,)),
            *checks,
        ),
        further_models=further_models,
    )
