"""The plugin of an algorithm that learns from given rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.requirement import LOSSES
from rl_algos.supervised.config import SupervisedConfig
from rl_core import resolve
from rl_core.config import Config, Problem, is_changed
from rl_core.model_config import ModelConfig
from rl_core.plugins import AlgorithmPlugin, ModelNeed, Requirement, TrainingDefaults, nothing_further


def supervised_algorithm(
    name: str,
    *,
    sections: Mapping[str, type[Config] | Callable[[Any], type[Config]]],
    implementation: str,
    models: Callable[[Any], Mapping[str, ModelNeed]],
    validation_metrics: Callable[[Any], Iterable[str] | None],
    training_defaults: TrainingDefaults,
    optional_models: tuple[str, ...] = (),
    further: Callable[[Any], tuple[Requirement, ...]] = nothing_further,
    checks: tuple[Callable[[Any], Iterable[Problem]], ...] = (),
    scores_tasks: bool = False,
) -> AlgorithmPlugin:
    """Return a plugin that trains a model on given rows, without rollouts.

    Args:
        name: Name of the algorithm.
        sections: Sections of the config except `data`; the first extends `SupervisedConfig`.
        implementation: A `rl_algos.supervised.algorithm.SupervisedAlgorithm`.
        models: See `AlgorithmPlugin`.
        validation_metrics: See `AlgorithmPlugin`.
        training_defaults: Defaults of the policy, the only model that trains.
        optional_models: See `AlgorithmPlugin`.
        further: See `AlgorithmPlugin`.
        checks: Checks after the checks of validation, environments and lengths.
        scores_tasks: True if its `run` can score tasks (`eval`), for which its policy generates.
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
        optional_models=optional_models,
        training_defaults=lambda _: {"policy": training_defaults},
        requirements=(LOSSES,),
        further=further,
        validation_metrics=validation_metrics,
        without_validation={f"{key}.{name}": value for name, value in WITHOUT_VALIDATION.items()},
        checks=(check, *checks),
        with_tasks=_with_tasks if scores_tasks else None,
    )


def _with_tasks(plugin: AlgorithmPlugin) -> AlgorithmPlugin:
    # Rollouts learn from demonstrations with the code of SFT, so this folder does not import them.
    found: AlgorithmPlugin = resolve("rl_algos.rollouts.plugin:with_tasks")(plugin)
    return found


WITHOUT_VALIDATION: Mapping[str, Any] = {
    "val_period": 0,
    "val_batches": None,
    "val_global_batch_size": None,
    "val_at_start": False,
    "val_at_end": False,
    "stop_at_validation_loss": None,
}
"""Keys of a `SupervisedConfig` that are for validation, and the values without one."""


def supervised_problems(
    key: str, section: SupervisedConfig, data: DataConfig, policy: ModelConfig
) -> Iterator[Problem]:
    """Yield settings that have no effect, or that contradict one another.

    Args:
        key: Key of the algorithm's section.
        section: Config section of the algorithm.
        data: Config section `data`.
        policy: Config section of the model.
    """
    if not data.train_datasets:
        remedy = "Add a dataset. Only runs that learn from users (grpo.agent.live) have none"
        yield Problem("data.train", "must not be empty", got=[], remedy=remedy)
    for name in () if data.validation_datasets else WITHOUT_VALIDATION:
        if (got := getattr(section, name)) and is_changed(section, name):
            remedy = "Set data.validation, or remove this key"
            yield Problem(f"{key}.{name}", "needs validation data, and there is none", got=got, remedy=remedy)
    for place, dataset in data.sections():
        if dataset.env_name is not None:
            yield Problem.unused(f"{place}.env_name", f"because {key} trains on given data and scores nothing")
    limit, most = data.max_input_seq_length, policy.max_total_sequence_length
    if limit is not None and limit > most:
        reason = f"must not exceed policy.max_total_sequence_length ({most})"
        remedy = "Lower it, or remove it to use the same limit"
        yield Problem("data.max_input_seq_length", reason, got=limit, remedy=remedy)
