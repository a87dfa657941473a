"""Recipes, environments and datasets that a config can choose, with their settings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from rl_algos.data.sources.hub_datasets import DATASETS as DATASETS_OF_HUB
from rl_algos.data.sources.hub_datasets import PREFERENCES
from rl_core import resolve
from rl_core.config import Config, Explanation, assemble, did_you_mean, explain, nearest
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.plugins import DATASETS, ENVIRONMENTS, KINDS, DatasetTask, Requirement, load_problem, plugins
from rl_launch.recipes import RECIPES, recipe_names
from rl_launch.run_config.reading import read_raw
from rl_launch.worker_envs.driver import importable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """A recipe that comes with this package.

    Args:
        name: As `rl train` takes it.
        algorithm: Algorithm that it trains with.
        summary: The comment at the top of its file.
        model: Name of its model, without its owner.
        num_gpus: Number of GPUs; 0 if it is made for a CPU.
        num_nodes: Number of machines.
    """

    name: str
    algorithm: str
    summary: str
    model: str
    num_gpus: int
    num_nodes: int

    @property
    def purpose(self) -> str:
        """Title of the group of recipes that it is listed in, one of `PURPOSES`."""
        return PURPOSES[min(self.num_gpus, 2) if self.num_nodes == 1 else -1]

    @property
    def size(self) -> str:
        """The machine that it is made for, in words."""
        gpus = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}"
        return f"{gpus} on {self.num_nodes} nodes" if self.num_nodes > 1 else gpus if self.num_gpus else "CPU"


PURPOSES = ("To learn and to test, on a CPU", "On one GPU", "On one node", "On a cluster")
"""Groups of recipes, by the machine that they are made for."""


@dataclass(frozen=True)
class Choice:
    """An installed environment or dataset.

    Args:
        name: As configs write it.
        doc: One line.
        settings: An explanation of each.
        missing: The requirement to install before a run can use it, as pip takes it; empty if it is installed.
        tasks: Tasks of a dataset that chooses among several.
    """

    name: str
    doc: str
    settings: tuple[Explanation, ...]
    missing: str = ""
    tasks: Mapping[str, DatasetTask] | None = None


def recipes() -> list[Recipe]:
    """Return every recipe of this package, by purpose and name; imports nothing."""
    return sorted(map(_recipe, recipe_names()), key=lambda recipe: (PURPOSES.index(recipe.purpose), recipe.name))


def _recipe(name: str) -> Recipe:
    raw = read_raw(name)
    cluster = raw.select("cluster") or {}
    num_nodes = int(cluster.get("num_nodes", 1))
    num_gpus = num_nodes * int(cluster["gpus_per_node"]) if cluster.get("device") == "cuda" else 0
    model = str(raw.select("policy.model_name")).rpartition("/")[2]
    with (RECIPES / f"{name}.yaml").open(encoding="utf-8") as file:
        # the comment at the top of its file, on one line
        comment = takewhile(lambda line: line.startswith("#"), file)
        summary = " ".join(line.lstrip("#").strip() for line in comment)
    return Recipe(name, str(raw.select("algorithm")), summary, model, num_gpus, num_nodes)


def shared_settings() -> tuple[Explanation, ...]:
    """Return the settings that every environment has."""
    root = assemble("Root", {"env": assemble("Environments", {"NAME": EnvironmentConfig})})
    return explain(root, "env.NAME").children


def environments() -> dict[str, Choice]:
    """Return every installed environment. Settings have their keys in a config, `env.<name>.<setting>`."""
    found = {}
    for name, plugin in plugins(ENVIRONMENTS).items():
        root = assemble("Root", {"env": assemble("Environments", {name: plugin.config})})
        explained = explain(root, f"env.{name}")
        settings = tuple(_with_those_within(root, explained.children))
        found[name] = Choice(name, explained.doc, settings, _missing(plugin.requirement))
    return found


def _with_those_within(root: type[Config], settings: Iterable[Explanation]) -> Iterator[Explanation]:
    """Yield settings, each section among them followed by its own."""
    for setting in settings:
        yield setting
        if isinstance(setting.default, Mapping):
            yield from _with_those_within(root, explain(root, setting.key).children)


def datasets() -> dict[str, Choice]:
    """Return every installed dataset. Settings have keys relative to `data.train.settings`."""
    found = {}
    for name, plugin in plugins(DATASETS).items():
        explained = explain(plugin.settings, "") if plugin.settings is not None else None
        doc, settings = (explained.doc, explained.children) if explained is not None else ("", ())
        tasks = tasks_of(name) if plugin.tasks else None
        found[name] = Choice(name, doc, settings, _missing(plugin.requirement), tasks)
    return found


def hub_datasets() -> dict[str, tuple[str, ...]]:
    """Return the hub datasets that need only a name: a line about each, and the keys that the name sets."""
    found: dict[str, tuple[str, ...]] = {}
    for known, kind in ((DATASETS_OF_HUB, ""), (PREFERENCES, "preferences: ")):
        for name, one in known.items():
            keys = {"processor": one.processor, "subset": one.subset, "env_name": one.environment or None}
            said = [f"{key}: {value}" for key, value in keys.items() if value]
            said += [f"split: {split} for {purpose}" for purpose, split in one.splits.items() if split != purpose]
            found[name] = (*found.get(name, ()), f"{kind}{one.doc}", *([", ".join(said)] if said else []))
    return found


@cache
def tasks_of(dataset: str) -> Mapping[str, DatasetTask]:
    """Return the tasks of a dataset by name; empty if it has none, or a package that it needs is not installed."""
    plugin = plugins(DATASETS)[dataset]
    try:
        return {task.name: task for task in resolve(plugin.tasks)()} if plugin.tasks else {}
    except Exception as error:  # noqa: BLE001 - the code of another package, whose fault costs its tasks only
        _log.warning("the tasks of the dataset %s cannot be listed: %s: %s", dataset, type(error).__name__, error)
        return {}


def chosen(choices: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return one of several by name.

    Raises:
        ConfigError: If there is none of that name; lists the nearest and the allowed ones.
    """
    if name not in choices:
        group = next((group for group, words in KINDS.items() if words == kind), None)
        if group is not None and (broken := load_problem(group, name)):
            raise ConfigError(broken)
        known = ", ".join(nearest(name, choices, most=8) or choices) if len(choices) > 20 else ", ".join(choices)
        raise ConfigError(f"there is no {kind} {name!r}{did_you_mean(name, choices)}; allowed: {known or 'none'}")
    return choices[name]


def _missing(requirement: Requirement) -> str:
    if all(map(importable, requirement.imports)):
        return ""
    extras = sorted({extra for names in requirement.extras.values() for extra in names})
    return requirement.distribution + (f"[{','.join(extras)}]" if extras else "")
