"""The plugin of an algorithm that learns from given rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.requirement import LOSSES
from rl_algos.supervised.checks import WITHOUT_VALIDATION, supervised_problems
from rl_core.config import Config, Problem
from rl_core.plugins import AlgorithmPlugin, ModelNeed, Requirement, SectionNames, TrainingDefaults, nothing_further


def supervised_algorithm(
    name: str,
    *,
    sections: Mapping[str, type[Config] | Callable[[Any], type[Config]]],
    implementation: str,
    models: Callable[[Any], Mapping[str, ModelNeed]],
    validation_metrics: Callable[[Any], Iterable[str] | None],
    training_defaults: TrainingDefaults,
    model_sections: tuple[str, ...] | Callable[[SectionNames], tuple[str, ...]] = ("policy",),
    further: Callable[[Any], tuple[Requirement, ...]] = nothing_further,
    checks: tuple[Callable[[Any], Iterable[Problem]], ...] = (),
) -> AlgorithmPlugin:
    """A plugin that trains a model on given rows, without rollouts.

    Args:
        name: Name of the algorithm.
        sections: Sections of the config except `data`; the first extends `SupervisedConfig`.
        implementation: A `rl_algos.supervised.algorithm.SupervisedAlgorithm`.
        models: See `AlgorithmPlugin`.
        validation_metrics: See `AlgorithmPlugin`.
        training_defaults: Defaults of the policy, the only model that trains.
        model_sections: See `AlgorithmPlugin`.
        further: See `AlgorithmPlugin`.
        checks: Checks in addition to those of validation, environments and lengths.
    """
    key = next(iter(sections))

    def check(config: Any) -> Iterator[Problem]:
        yield from supervised_problems(key, attrgetter(key)(config), config.data, config.policy)

    return AlgorithmPlugin(
        name=name,
        sections={**sections, "data": DataConfig},
        implementation=implementation,
        generates=False,
        models=models,
        model_sections=model_sections,
        training_defaults=lambda _: {"policy": training_defaults},
        requirements=(LOSSES,),
        further=further,
        validation_metrics=validation_metrics,
        without_validation={f"{key}.{name}": value for name, value in WITHOUT_VALIDATION.items()},
        checks=(check, *checks),
    )
