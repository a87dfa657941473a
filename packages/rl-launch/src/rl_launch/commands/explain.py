"""`rl config explain`: a key of one config, or of the configs of all algorithms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rl_core.config import (
    DEFAULT,
    Config,
    Explanation,
    RawConfig,
    all_keys,
    by_another_name,
    did_you_mean,
    explain,
    load,
    values_of,
)
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.plugins import ALGORITHMS, DATASETS, DatasetPlugin, DatasetTask, names, plugins
from rl_launch.commands.catalog import chosen, tasks_of
from rl_launch.foreign_keys.meanings import Meaning, meanings
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import read_plan, read_raw
from rl_launch.run_config.root_types import root_type, type_of
from rl_launch.session.directory.checkpoint_name import CheckpointName

_SETTINGS = re.compile(r"(?P<dataset>data\.(?:train|validation)(?:\[\d+\])?)\.settings(?:\.(?P<rest>.+))?")
_MOST_NAMED = 6
_T = TypeVar("_T")


@dataclass(frozen=True)
class Explained:
    """A key as some configs have it.

    Args:
        explanation: Explanation of the key.
        condition: The choices under which this holds, as text; empty if it always does.
        child_conditions: The same of each of the explanation's children; empty if all hold whenever this does.
    """

    explanation: Explanation
    condition: str = ""
    child_conditions: tuple[str, ...] = ()


def names_config(text: str) -> bool:
    """Return whether a string is a recipe, a YAML file or a run directory, rather than a key."""
    path = Path(text).expanduser()
    is_file = path.suffix in (".yaml", ".yml") or (path / "config.yaml").is_file()
    return is_file or text in recipe_names() or CheckpointName.parse(text) is not None


def explain_anywhere(key: str) -> list[Explained]:
    """A key of any config, from the schemas of all installed algorithms.

    Raises:
        ConfigError: If no algorithm has such a key, naming the nearest.
    """
    if settings := _SETTINGS.fullmatch(key):
        return list(_of_datasets(settings["dataset"], settings["rest"] or "", plugins(DATASETS), None))
    roots = roots_of_all()
    found: list[tuple[Explanation, list[str]]] = []
    for name, root in roots.items():
        with suppress(ConfigError):
            found.append((explain(root, key), [name]))
    if not found and (of_choices := _of_choices(key)):
        return of_choices
    if not found:
        path = tuple(key.split("."))
        if elsewhere := next(filter(None, (by_another_name(root, path, {}) for root in roots.values())), None):
            raise ConfigError(f"{key}: {elsewhere.message}")
        known = {each for root in roots.values() for each in all_keys(root, {})}
        raise ConfigError(f"{key}: no such key{did_you_mean(key, known)}")
    return [
        _with_choices(_merged([explanation for explanation, _ in alike], [name for _, (name,) in alike], len(roots)))
        for alike in _grouped(found, lambda each: _identity(each[0]))
    ]


def _roots_of_choices(section: str) -> dict[str, type[Config]]:
    """Return the config type with each function that a section can name, by that name; empty for a section whose keys
    do not follow from its `name`."""
    for algorithm, plugin in plugins(ALGORITHMS).items():
        try:
            root_type(plugin, load({"algorithm": algorithm}, [f"{section}.name=?"]))
        except ConfigProblems as error:
            allowed = next((each.allowed for each in error.problems if each.key == f"{section}.name"), "")
            choices = re.findall(r"[\w-]+", allowed.partition(", or ")[0])
            return {
                choice: root_type(plugin, load({"algorithm": algorithm}, [f"{section}.name={choice}"]))
                for choice in choices
            }
    return {}


def _with_choices(each: Explained) -> Explained:
    """Add the keys of a section that belong to other functions than the one it names by default."""
    explanation = each.explanation
    if all(child.key != f"{explanation.key}.name" for child in explanation.children):
        return each
    roots = _roots_of_choices(explanation.key)
    if not roots:
        return each
    known = dict(zip([child.key for child in explanation.children], each.child_conditions, strict=True))
    of_choices = [(child, name) for name, root in roots.items() for child in explain(root, explanation.key).children]
    having: dict[str, list[str]] = {}
    children = {child.key: child for child in explanation.children}
    for child, name in of_choices:
        having.setdefault(child.key, []).append(name)
        children.setdefault(child.key, child)
    conditions = tuple(known.get(name) or _only_named(having.get(name, []), len(roots)) for name in children)
    shown = replace(explanation, children=tuple(children.values()))
    return replace(each, explanation=shown, child_conditions=conditions)


def _only_named(names_having: Sequence[str], num_all: int) -> str:
    return f"name: {' or '.join(names_having)}" if 0 < len(names_having) < num_all else ""


def _of_choices(key: str) -> list[Explained]:
    """Return a key as the functions have it that its section can name; empty if none has it."""
    section = key.rpartition(".")[0]
    found: list[tuple[Explanation, str]] = []
    for name, root in (_roots_of_choices(section) if section else {}).items():
        with suppress(ConfigError):
            found.append((explain(root, key), name))
    return [
        Explained(alike[0][0], f"{section}.name: {' or '.join(name for _, name in alike)}")
        for alike in _grouped(found, lambda each: _identity(each[0]))
    ]


def foreign_meanings(key: str, source: str = "") -> list[Meaning]:
    """Return what a key of another system is here; none if no other system has it.

    Args:
        key: Dotted key, or its last name.
        source: A recipe, a YAML file or a run directory, whose algorithm is meant; empty for any.
    """
    algorithm = key.partition(".")[0] if key.partition(".")[0] in names(ALGORITHMS) else ""
    if source:
        with suppress(ConfigError):
            algorithm = str(read_raw(source).select("algorithm", algorithm))
    return meanings(key, algorithm)


def explain_destinations(found: Sequence[Meaning]) -> list[Explained]:
    """Return explanations of the keys that keys of other systems are here."""
    explained = []
    for key in dict.fromkeys(meaning.key for meaning in found if meaning.key):
        with suppress(ConfigError):
            explained += explain_anywhere(key)
    return explained


def roots_of_all() -> dict[str, type[Config]]:
    """The config type of every installed algorithm, by its name."""
    return {name: root_type(plugin, load({"algorithm": name})) for name, plugin in plugins(ALGORITHMS).items()}


def only_with(algorithms: Sequence[str], num_all: int) -> str:
    """The condition of a key that these of all algorithms have; empty if all do."""
    return "" if len(algorithms) == num_all else f"algorithm: {' or '.join(algorithms)}"


def _identity(explanation: Explanation) -> Any:
    """What explanations of one key by several algorithms share if they are shown as one; of sections, keys differ."""
    is_section = explanation.type == "section"
    return (explanation.doc, explanation.type) if is_section else replace(explanation, children=())


def _grouped(items: Iterable[_T], identity: Callable[[_T], Any]) -> list[list[_T]]:
    """Items of one identity together, in the order of the first of each."""
    groups: list[tuple[Any, list[_T]]] = []
    for item in items:
        mine = identity(item)
        group = next((members for other, members in groups if other == mine), None)
        if group is None:
            groups.append((mine, [item]))
        else:
            group.append(item)
    return [members for _, members in groups]


def _merged(alike: Sequence[Explanation], algorithms: Sequence[str], num_all: int) -> Explained:
    """One key as several algorithms have it, with the keys below that any of them has."""
    children = [(child, name) for each, name in zip(alike, algorithms, strict=True) for child in each.children]
    groups = _grouped(children, lambda child: (child[0].key, _identity(child[0])))
    # keys that all have come first
    groups.sort(key=lambda group: len(group) < len(algorithms))
    conditions = [[name for _, name in group] for group in groups]
    return Explained(
        replace(alike[0], children=tuple(group[0][0] for group in groups)),
        only_with(algorithms, num_all),
        tuple("" if len(names) == len(algorithms) else only_with(names, num_all) for names in conditions),
    )


def explain_in(source: str, key: str, overrides: Sequence[str] = ()) -> tuple[list[Explained], str]:
    """A key of one config, with its value and origin.

    Args:
        source: A recipe, a YAML file or a run directory.
        key: Dotted; empty for the root.
        overrides: Keys to set.

    Returns:
        The key explained, and the problems of the config as text, which do not prevent the explanation.

    Raises:
        ConfigError: If the config cannot be read, or has no such key.
    """
    raw = read_raw(source, overrides)
    settings = _SETTINGS.fullmatch(key)
    try:
        config: Any = read_plan(source, overrides).resolved
        root, problems = type(config.config), ""
    except ConfigError as error:
        problems = str(error)
        try:
            root = type_of(raw)
        except ConfigError:
            return explain_anywhere(key), problems
        config = values_of(raw, root)
    if settings:
        name = raw.select(f"{settings['dataset']}.dataset_name")
        plugin = plugins(DATASETS).get(name)
        if plugin is not None and plugin.settings is not None:
            return list(_of_datasets(settings["dataset"], settings["rest"] or "", {name: plugin}, raw)), problems
    return [Explained(explain(root, key, config))], problems


def _of_datasets(
    dataset: str, rest: str, known: Mapping[str, DatasetPlugin], raw: RawConfig | None
) -> Iterator[Explained]:
    """A setting as datasets have it, or all settings of each.

    Raises:
        ConfigError: If none has it.
    """
    refusals = []
    for name, plugin in known.items():
        if plugin.settings is None:
            continue
        try:
            task = raw.select(f"{dataset}.settings.task") if raw is not None else None
            found = list(_of_tasks(plugin, rest, task))
            found = found or [Explained(explain(plugin.settings, rest))]
        except ConfigError as error:
            refusals.append(f"dataset {name}: {error}")
            continue
        for each in found:
            condition = f"{dataset}.dataset_name: {name}{each.condition}"
            yield Explained(placed(each.explanation, f"{dataset}.settings", raw), condition)
    if len(refusals) == sum(plugin.settings is not None for plugin in known.values()):
        raise ConfigError("\n".join(refusals))


def placed(explanation: Explanation, prefix: str, raw: RawConfig | None) -> Explanation:
    """An explanation of a setting of a dataset with its full key, and the value in the config if there is one."""
    key = f"{prefix}.{explanation.key}" if explanation.key else prefix
    value, origin = explanation.value, explanation.origin
    if raw is not None and raw.origin(key) != DEFAULT:
        value, origin = raw.select(key, value), raw.origin(key)
    children = tuple(placed(child, prefix, raw) for child in explanation.children)
    return replace(explanation, key=key, value=value, origin=origin, children=children)


def _of_tasks(plugin: DatasetPlugin, rest: str, task: str | None) -> Iterator[Explained]:
    """Explanations of the settings `task` and `config` from a dataset's tasks; none of any other setting."""
    tasks = tasks_of(plugin.name)
    head, _, setting = rest.partition(".")
    if not tasks or plugin.settings is None or head not in ("task", "config"):
        return
    if head == "task":
        some = ", ".join(list(tasks)[:_MOST_NAMED])
        allowed = f"one of {len(tasks)} tasks, such as {some}; rl data list {plugin.name} lists them"
        yield Explained(replace(explain(plugin.settings, "task"), type=allowed))
        return
    if task is not None:
        tasks = {task: chosen(tasks, task, f"task of {plugin.name}")}
    if not setting:
        section = explain(plugin.settings, "config")
        children = _settings(tasks[task]) if task is not None else ()
        yield Explained(replace(section, children=tuple(children)), f", task: {task}" if task is not None else "")
        return
    yield from _task_settings(plugin.name, tasks.values(), setting)


def _task_settings(dataset: str, tasks: Iterable[DatasetTask], setting: str) -> Iterator[Explained]:
    alike: dict[tuple[str, str], list[str]] = {}
    known: set[str] = set()
    for task in tasks:
        known |= task.settings.keys()
        if setting in task.settings:
            alike.setdefault(task.settings[setting], []).append(task.name)
    if not alike:
        raise ConfigError(f"no task of {dataset} has a setting {setting!r}{did_you_mean(setting, known)}")
    for (kind, default), having in alike.items():
        more = f" and {len(having) - _MOST_NAMED} more" if len(having) > _MOST_NAMED else ""
        explanation = _setting(setting, kind, default)
        yield Explained(explanation, f", task: {' or '.join(having[:_MOST_NAMED])}{more}")


def _settings(task: DatasetTask) -> list[Explanation]:
    return [_setting(name, kind, default) for name, (kind, default) in task.settings.items()]


def _setting(name: str, kind: str, default: str) -> Explanation:
    return Explanation(f"config.{name}", "", kind, not default, default, default, DEFAULT)
