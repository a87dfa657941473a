"""Config keys explained: keys of one config or of all algorithms, search results, and their documentation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from rl_core.config import (
    DEFAULT,
    Config,
    Explanation,
    RawConfig,
    all_keys,
    by_another_name,
    did_you_mean,
    explain,
    explain_all,
    load,
    show,
    values_of,
)
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.plugins import ALGORITHMS, DATASETS, DatasetPlugin, names, plugins
from rl_launch.commands.catalog import chosen, tasks_of
from rl_launch.foreign_keys.hints import Meaning, meanings
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import read_plan, read_raw
from rl_launch.run_config.root_types import root_type, type_of
from rl_launch.run_session.directory.checkpoint_name import CheckpointName

_SETTINGS = re.compile(r"(?P<dataset>data\.(?:train|validation)(?:\[\d+\])?)\.settings(?:\.(?P<rest>.+))?")
_WORD = re.compile(r"[^\W_]+")
_MAX_NAMED = 6
_GUIDES = {r"(?i)fr[eo]{1,2}z|requires_?grad": "docs/freezing.md"}
"""Guides by a pattern of the words that users search for."""

_Named = tuple[Explanation, str]
"""An explanation, and the name of the algorithm, function or dataset that it is from."""


@dataclass(frozen=True)
class Explained:
    """A key as some configs have it.

    Args:
        explanation: Explanation of the key.
        condition: The choices that this needs, as text; empty if it always does.
        child_conditions: The same of each of the explanation's children; empty if all hold whenever this does.
    """

    explanation: Explanation
    condition: str = ""
    child_conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundKey:
    """A key that a search found.

    Args:
        explanation: Explanation of the key, without children.
        condition: The choices that it needs, as text; empty if it always does.
        also: Further keys of the same name and meaning, such as the keys of another model.
    """

    explanation: Explanation
    condition: str = ""
    also: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """The last name of the key."""
        return self.explanation.key.rpartition(".")[2]


def names_config(text: str) -> bool:
    """Return whether a string is a recipe, a YAML file or a run directory, rather than a key."""
    path = Path(text).expanduser()
    is_file = path.suffix in (".yaml", ".yml") or (path / "config.yaml").is_file()
    return is_file or text in recipe_names() or CheckpointName.parse(text) is not None


def roots_of_all() -> dict[str, type[Config]]:
    """Return the config type of every installed algorithm, by its name."""
    return {name: root_type(plugin, load({"algorithm": name})) for name, plugin in plugins(ALGORITHMS).items()}


def explain_anywhere(key: str) -> list[Explained]:
    """Explain a key of any config, from the schemas of all installed algorithms.

    Raises:
        ConfigError: If no algorithm has such a key; contains the nearest keys.
    """
    if settings := _SETTINGS.fullmatch(key):
        return list(_of_datasets(settings["dataset"], settings["rest"] or "", plugins(DATASETS), None))
    roots = roots_of_all()
    found = _in_each(roots, key)
    section = key.rpartition(".")[0]
    if not found and section and (of_choices := _in_each(_roots_of_choices(section), key)):
        # its section has the key with other functions than its default
        return [
            Explained(alike[0][0], f"{section}.name: {' or '.join(name for _, name in alike)}")
            for alike in _grouped(of_choices, _identity)
        ]
    if not found:
        path = tuple(key.split("."))
        if elsewhere := next(filter(None, (by_another_name(root, path, {}) for root in roots.values())), None):
            raise ConfigError(f"{key}: {elsewhere.message}")
        known = {each for root in roots.values() for each in all_keys(root, {})}
        raise ConfigError(f"{key}: no such key{did_you_mean(key, known)}")
    return [_with_choices(_merged(alike, len(roots))) for alike in _grouped(found, _identity)]


def explain_in(source: str, key: str, overrides: Sequence[str] = ()) -> tuple[list[Explained], str]:
    """Explain a key of one config, with its value and origin.

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
        keys, widest = raw.plain(), type_of(raw)
        if key not in all_keys(root, keys) and key in all_keys(widest, keys):
            # The run has no tasks to score, and so not the keys that only they need.
            root, config = widest, values_of(raw, widest)
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


def foreign_meanings(key: str, source: str = "") -> list[Meaning]:
    """Return the keys here that mean the same as a key of another system; none if no other system has it.

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
    """Return explanations of the keys here that mean the same as keys of other systems."""
    explained = []
    for key in dict.fromkeys(meaning.key for meaning in found if meaning.key):
        with suppress(ConfigError):
            explained += explain_anywhere(key)
    return explained


def search(text: str, source: str = "", overrides: Sequence[str] = ()) -> tuple[list[FoundKey], list[FoundKey]]:
    """Search for keys.

    Args:
        text: Words, or a name such as `learning_rate`; matched regardless of case and plural.
        source: A recipe, a YAML file or a run directory whose keys are searched, with their values; if empty, the keys
            of all installed algorithms.
        overrides: Keys to set in it.

    Returns:
        The keys that fit best: by their whole last name, or else by all words in it, or else by all words in it and the
        description, or else in the whole key and the description. Then the keys that fit less well.

    Raises:
        ConfigError: If the config cannot be read.
    """
    words = _words(text)
    ranked: dict[int, list[FoundKey]] = {}
    for found in (_keys_of(source, overrides) if source else every_key()) if words else ():
        explanation, leaf = found.explanation, _words(found.leaf)
        # an entry of a mapping has the documentation of the mapping, which is found itself
        doc = frozenset() if explanation.part_of else _words(explanation.doc)
        fits = (words == leaf, words <= leaf, words <= leaf | doc, words <= _words(explanation.key) | doc)
        # an entry of a list has only a position
        if any(fits) and not explanation.key.endswith("]"):
            ranked.setdefault(fits.index(True), []).append(found)
    first, *others = [ranked[rank] for rank in sorted(ranked)] or [[]]
    return _joined(first), _joined([found for each in others for found in each])


def every_key() -> Iterator[FoundKey]:
    """Yield every key of the configs of all installed algorithms and of the settings of all installed datasets.

    A key that several of them have with different meanings occurs once for each.
    """
    roots = roots_of_all()
    every = ((explanation, name) for name, root in roots.items() for explanation in explain_all(root))
    for explanation, having in _gathered(every):
        yield FoundKey(explanation, _only_with(having, len(roots)))
    yield from _dataset_settings(None)


def page_of(explanation: Explanation) -> str:
    """Return the page and anchor of a config key, relative to the site's root, such as
    `reference/config/grpo.html#grpo.seed`. An entry of a list has the place of the list.
    """
    key = explanation.key.partition("[")[0]
    section, dot, _ = key.partition(".")
    # the page `index` has the keys that are in no section
    return f"reference/config/{section if dot or explanation.type == 'section' else 'index'}.html#{key}"


def address_of(explanation: Explanation) -> str:
    """Return the address of a config key in the documentation. Empty if the metadata of this package has no address of
    the documentation, or if the documentation does not have the key, such as the settings of your own environments.
    """
    urls = dict(url.split(", ", 1) for url in metadata("rl-launch").get_all("Project-URL") or ())
    base = urls.get("Documentation", "").rstrip("/")
    return f"{base}/{page_of(explanation)}" if base and explanation.key.partition("[")[0] in _documented() else ""


@cache
def _documented() -> frozenset[str]:
    return frozenset(each.explanation.key for each in every_key())


def guide_about(words: str) -> str:
    """Return the guide about something that users look for among the keys and that no key sets; empty if there is
    none.
    """
    return next((guide for found, guide in _GUIDES.items() if re.search(found, words)), "")


def _in_each(roots: Mapping[str, type[Config]], key: str) -> list[_Named]:
    found = []
    for name, root in roots.items():
        with suppress(ConfigError):
            found.append((explain(root, key), name))
    return found


def _only_with(algorithms: Sequence[str], num_all: int) -> str:
    """Return the condition of a key that these of all algorithms have; empty if all do."""
    return "" if len(algorithms) == num_all else f"algorithm: {' or '.join(algorithms)}"


def _roots_of_choices(section: str) -> dict[str, type[Config]]:
    """Return the config type with each function that a section can name, by that name; empty for a section whose keys
    do not follow from its `name`."""
    for algorithm, plugin in plugins(ALGORITHMS).items():
        try:
            root_type(plugin, load({"algorithm": algorithm}, [f"{section}.name=?"]))
        except ConfigProblems as error:
            allowed = next((each.allowed for each in error.problems if each.key == f"{section}.name"), "")
            return {
                choice: root_type(plugin, load({"algorithm": algorithm}, [f"{section}.name={choice}"]))
                for choice in re.findall(r"[\w-]+", allowed.partition(", or ")[0])
            }
    return {}


def _with_choices(each: Explained) -> Explained:
    """Add the keys of a section that belong to other functions than its default."""
    explanation = each.explanation
    is_choice = any(child.key == f"{explanation.key}.name" for child in explanation.children)
    roots = _roots_of_choices(explanation.key) if is_choice else {}
    if not roots:
        return each
    known = dict(zip([child.key for child in explanation.children], each.child_conditions, strict=True))
    having: dict[str, list[str]] = {}
    children = {child.key: child for child in explanation.children}
    for name, root in roots.items():
        for child in explain(root, explanation.key).children:
            having.setdefault(child.key, []).append(name)
            children.setdefault(child.key, child)
    conditions = []
    for key in children:
        some = having.get(key, [])
        only = f"name: {' or '.join(some)}" if 0 < len(some) < len(roots) else ""
        conditions.append(known.get(key) or only)
    shown = replace(explanation, children=tuple(children.values()))
    return replace(each, explanation=shown, child_conditions=tuple(conditions))


def _identity(explanation: Explanation) -> Any:
    """Return the part that equal explanations of one key by several algorithms share. Sections may have different
    keys below."""
    is_section = explanation.type == "section"
    return (explanation.doc, explanation.type) if is_section else replace(explanation, children=())


def _grouped(items: Iterable[_Named], identity: Callable[[Explanation], Any]) -> list[list[_Named]]:
    """Return explanations of one identity together, in the order of the first of each."""
    groups: list[tuple[Any, list[_Named]]] = []
    for item in items:
        mine = identity(item[0])
        group = next((members for other, members in groups if other == mine), None)
        if group is None:
            groups.append((mine, [item]))
        else:
            group.append(item)
    return [members for _, members in groups]


def _merged(alike: Sequence[_Named], num_all: int) -> Explained:
    """Return one key as several algorithms have it, with the keys below that any of them has."""
    children = [(child, name) for each, name in alike for child in each.children]
    groups = _grouped(children, lambda child: (child.key, _identity(child)))
    # keys that all have come first
    groups.sort(key=lambda group: len(group) < len(alike))
    conditions = [[name for _, name in group] for group in groups]
    return Explained(
        replace(alike[0][0], children=tuple(group[0][0] for group in groups)),
        _only_with([name for _, name in alike], num_all),
        tuple("" if len(names) == len(alike) else _only_with(names, num_all) for names in conditions),
    )


def _of_datasets(
    dataset: str, rest: str, known: Mapping[str, DatasetPlugin], raw: RawConfig | None
) -> Iterator[Explained]:
    """Explain a setting as datasets have it, or all settings of each.

    Raises:
        ConfigError: If none has it.
    """
    refusals = []
    for name, plugin in known.items():
        if plugin.settings is None:
            continue
        try:
            task = raw.select(f"{dataset}.settings.task") if raw is not None else None
            found = list(_of_tasks(plugin, rest, task)) or [Explained(explain(plugin.settings, rest))]
        except ConfigError as error:
            refusals.append(f"dataset {name}: {error}")
            continue
        for each in found:
            condition = f"{dataset}.dataset_name: {name}{each.condition}"
            yield Explained(_placed(each.explanation, f"{dataset}.settings", raw), condition)
    if len(refusals) == sum(plugin.settings is not None for plugin in known.values()):
        raise ConfigError("\n".join(refusals))


def _placed(explanation: Explanation, prefix: str, raw: RawConfig | None) -> Explanation:
    """Return an explanation of a setting of a dataset with its full key, and its value in the config if it is set."""
    key = f"{prefix}.{explanation.key}" if explanation.key else prefix
    value, origin = explanation.value, explanation.origin
    if raw is not None and raw.origin(key) != DEFAULT:
        value, origin = raw.select(key, value), raw.origin(key)
    children = tuple(_placed(child, prefix, raw) for child in explanation.children)
    return replace(explanation, key=key, value=value, origin=origin, children=children)


def _of_tasks(plugin: DatasetPlugin, rest: str, chosen_task: str | None) -> Iterator[Explained]:
    """Explain the settings `task` and `config` from a dataset's tasks; yields nothing for any other setting."""
    tasks = tasks_of(plugin.name)
    head, _, setting = rest.partition(".")
    if not tasks or plugin.settings is None or head not in ("task", "config"):
        return
    if head == "task":
        some = ", ".join(list(tasks)[:_MAX_NAMED])
        allowed = f"one of {len(tasks)} tasks, such as {some}; rl data list {plugin.name} lists them"
        yield Explained(replace(explain(plugin.settings, "task"), type=allowed))
        return
    if chosen_task is not None:
        tasks = {chosen_task: chosen(tasks, chosen_task, f"task of {plugin.name}")}
    if not setting:
        own = tasks[chosen_task].settings.items() if chosen_task is not None else ()
        children = tuple(_task_setting(name, kind, default) for name, (kind, default) in own)
        condition = f", task: {chosen_task}" if chosen_task is not None else ""
        yield Explained(replace(explain(plugin.settings, "config"), children=children), condition)
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for task in tasks.values():
        if setting in task.settings:
            alike.setdefault(task.settings[setting], []).append(task.name)
    if not alike:
        near = did_you_mean(setting, {name for task in tasks.values() for name in task.settings})
        raise ConfigError(f"no task of {plugin.name} has a setting {setting!r}{near}")
    for (kind, default), having in alike.items():
        more = f" and {len(having) - _MAX_NAMED} more" if len(having) > _MAX_NAMED else ""
        condition = f", task: {' or '.join(having[:_MAX_NAMED])}{more}"
        yield Explained(_task_setting(setting, kind, default), condition)


def _task_setting(name: str, kind: str, default: str) -> Explanation:
    return Explanation(f"config.{name}", "", kind, not default, default, default, DEFAULT)


def _meaning(explanation: Explanation) -> tuple[str, str, str]:
    """Return the part that keys of the same meaning share. Sections may have different keys below."""
    is_section = explanation.type == "section"
    return explanation.doc, explanation.type, "" if is_section else show(explanation.value)


def _gathered(every: Iterable[_Named]) -> Iterator[tuple[Explanation, list[str]]]:
    """Yield each key, and each other meaning of it, with the algorithms or datasets that have it so."""
    found: dict[str, dict[Any, tuple[Explanation, list[str]]]] = {}
    for explanation, name in every:
        meanings_of_key = found.setdefault(explanation.key, {})
        meanings_of_key.setdefault(_meaning(explanation), (explanation, []))[1].append(name)
    for each in found.values():
        yield from each.values()


def _keys_of(source: str, overrides: Sequence[str]) -> Iterator[FoundKey]:
    raw = read_raw(source, overrides)
    root = type_of(raw)
    settings = list(_dataset_settings(raw))
    documented = {found.explanation.key for found in settings}
    every = explain_all(root, values_of(raw, root))
    yield from (FoundKey(each) for each in every if each.key not in documented)
    yield from settings


def _dataset_settings(raw: RawConfig | None) -> Iterator[FoundKey]:
    """Yield settings of the installed datasets; with a config, the settings of the datasets that it chooses."""
    for section in ("data.train", "data.validation") if raw is not None else ("data.train",):
        named = raw.select(f"{section}.dataset_name") if raw is not None else None
        every = (
            (_placed(explanation, f"{section}.settings", raw), name)
            for name, plugin in plugins(DATASETS).items()
            if plugin.settings is not None and (raw is None or name == named)
            for explanation in explain_all(plugin.settings)
        )
        for explanation, having in _gathered(every):
            yield FoundKey(explanation, f"{section}.dataset_name: {' or '.join(having)}")


def _joined(found: Iterable[FoundKey]) -> list[FoundKey]:
    """Return keys, each with the other keys of the same name and meaning."""
    groups: dict[Any, list[FoundKey]] = {}
    for each in found:
        groups.setdefault((each.leaf, _meaning(each.explanation)), []).append(each)
    return [
        replace(first, also=tuple(dict.fromkeys(other.explanation.key for other in others)))
        for first, *others in groups.values()
    ]


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower().removesuffix("s") for word in _WORD.findall(text))
