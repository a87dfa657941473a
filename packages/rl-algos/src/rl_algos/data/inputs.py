"""Files and names that a config's data comes from, checked together before any row is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rl_algos.data.config import DataRoot, DatasetConfig, DatasetDefaults
from rl_algos.data.pass_rates import ROLLOUTS
from rl_algos.data.processors import processor
from rl_algos.data.rows.template import Surround
from rl_algos.data.sources import remote
from rl_algos.data.sources.load import settings_problem, source_problem
from rl_core.config import Problem
from rl_core.errors import ConfigError
from rl_core.plugins import DATASETS, names


def input_problems(config: DataRoot) -> Iterator[Problem]:
    """Yield the problems of the files, folders, hub names and processors of all datasets of a config."""
    for key, section in config.data.sections():
        yield from dataset_problems(key, section)


def dataset_problems(key: str, section: DatasetConfig | DatasetDefaults) -> Iterator[Problem]:
    """Yield the problems of the files, folders, hub names and processors of one dataset, or of the defaults of all.

    Args:
        key: Key of the section.
        section: Settings of one dataset, or the defaults of all.
    """
    if isinstance(section, DatasetConfig):
        if problem := source_problem(section):
            yield Problem(f"{key}.{'dataset_name' if section.data_path is None else 'data_path'}", problem)
        if problem := settings_problem(section):
            yield Problem(f"{key}.settings", problem)
        results = section.pass_rate.results if section.pass_rate is not None else None
        if results is not None and not (Path(results) / ROLLOUTS).is_file():
            reason = f"is not the folder of an evaluation: it does not contain {ROLLOUTS}"
            remedy = "Pass the folder that `rl eval ... run_dir=FOLDER` wrote"
            yield Problem(f"{key}.pass_rate.results", reason, got=results, remedy=remedy)
    # Each key is checked in a separate section, so that one does not hide the others. Any path will do there.
    for name, check in _CHECKS.items():
        if (value := getattr(section, name)) is not None:
            try:
                check(DatasetConfig.model_validate({"data_path": ".", name: value}))
            except ConfigError as error:
                yield Problem(f"{key}.{name}", str(error).removeprefix("data: "))


def network_sources(datasets: Iterable[DatasetConfig]) -> list[str]:
    """Return the sources of datasets whose rows are read over the network: names on the hub and addresses of stores."""
    installed = names(DATASETS)
    return [
        each.source
        for each in datasets
        if (each.dataset_name not in installed if each.data_path is None else remote.is_remote(each.data_path))
    ]


_CHECKS: dict[str, Callable[[DatasetConfig], object]] = {
    "prompt_file": Surround.of,
    "system_prompt_file": Surround.of,
    "processor": processor,
}
