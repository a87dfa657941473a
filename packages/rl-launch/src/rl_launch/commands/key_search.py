"""Keys found by their name, or by words of their names and descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rl_core.config import Explanation, RawConfig, Values, explain_all, show, values_of
from rl_core.plugins import DATASETS, plugins
from rl_launch.commands.explain import only_with, placed, roots_of_all
from rl_launch.run_config.reading import read_raw
from rl_launch.run_config.root_types import type_of

_WORD = re.compile(r"[^\W_]+")
_SECTIONS = ("data.train", "data.validation")


@dataclass(frozen=True)
class FoundKey:
    """A key that a search found.

    Args:
        explanation: Explanation of the key, without children.
        condition: The choices under which it exists, as text; empty if it always does.
        also: Further keys of the same name and meaning, such as those of another model.
    """

    explanation: Explanation
    condition: str = ""
    also: tuple[str, ...] = ()

    def is_named(self, name: str) -> bool:
        """Return whether this is the last name of the key."""
        return _leaf(self.explanation) == name


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Args:
        best: The keys that fit best: by their whole last name, or else by all words in it, or else by all words in it
            and the description, or else in the whole key and the description.
        others: Further keys that fit less well.
    """

    best: tuple[FoundKey, ...]
    others: tuple[FoundKey, ...]


def search(text: str, source: str = "", overrides: Sequence[str] = ()) -> Search:
    """Search for keys.

    Args:
        text: Words, or a name such as `learning_rate`; matched regardless of case and plural.
        source: A recipe, a YAML file or a run directory whose keys are searched, with their values; if empty, the keys
            of all installed algorithms.
        overrides: Keys to set in it.

    Raises:
        ConfigError: If the config cannot be read.
    """
    words = _words(text)
    if not words:
        return Search((), ())
    keys = [
        found
        for found in (_keys_of(source, overrides) if source else every_key())
        # entries of lists have no names
        if not found.explanation.key.endswith("]")
    ]
    ranked = [(rank, found) for found in keys if (rank := _rank(words, found.explanation)) is not None]
    ranked.sort(key=lambda each: each[0])
    first = ranked[0][0] if ranked else 0
    best = _joined([found for rank, found in ranked if rank == first])
    return Search(best, _joined([found for rank, found in ranked if rank > first]))


def every_key() -> Iterator[FoundKey]:
    """Every key of the configs of all installed algorithms and of the settings of all installed datasets.

    A key that several of them have with different meanings is in it once for each.
    """
    roots = roots_of_all()
    every = ((explanation, name) for name, root in roots.items() for explanation in explain_all(root))
    for explanation, names in _gathered(every):
        yield FoundKey(explanation, only_with(names, len(roots)))
    yield from _settings(None)


def _gathered(every: Iterable[tuple[Explanation, str]]) -> Iterator[tuple[Explanation, list[str]]]:
    """Each key, and each other meaning of it, with the names of those that have it so."""
    found: dict[str, list[tuple[Explanation, list[str]]]] = {}
    for explanation, name in every:
        known = found.setdefault(explanation.key, [])
        same = next((names for other, names in known if _means_the_same(other, explanation)), None)
        if same is None:
            known.append((explanation, [name]))
        else:
            same.append(name)
    for each in found.values():
        yield from each


def _keys_of(source: str, overrides: Sequence[str]) -> Iterator[FoundKey]:
    raw = read_raw(source, overrides)
    root = type_of(raw)
    values: Values = values_of(raw, root)
    settings = list(_settings(raw))
    documented = {found.explanation.key for found in settings}
    yield from (FoundKey(each) for each in explain_all(root, values) if each.key not in documented)
    yield from settings


def _settings(raw: RawConfig | None) -> Iterator[FoundKey]:
    """Settings of the installed datasets; with a config, of those that it names."""
    for section in _SECTIONS if raw is not None else _SECTIONS[:1]:
        chosen = raw.select(f"{section}.dataset_name") if raw is not None else None
        every = (
            (placed(explanation, f"{section}.settings", raw), name)
            for name, plugin in plugins(DATASETS).items()
            if plugin.settings is not None and (raw is None or name == chosen)
            for explanation in explain_all(plugin.settings)
        )
        for explanation, names in _gathered(every):
            yield FoundKey(explanation, f"{section}.dataset_name: {' or '.join(names)}")


def _means_the_same(one: Explanation, other: Explanation) -> bool:
    """Return whether two explanations say the same; sections with other keys below do."""
    is_section = one.type == "section"
    return (one.doc, one.type) == (other.doc, other.type) and (is_section or show(one.value) == show(other.value))


def _rank(words: frozenset[str], explanation: Explanation) -> int | None:
    """How well a key fits, 0 best; None if it does not have all words."""
    leaf = _words(_leaf(explanation))
    # the documentation of an entry is that of the mapping around it, which is found itself
    doc = frozenset() if explanation.part_of else _words(explanation.doc)
    if words == leaf:
        return 0
    if words <= leaf:
        return 1
    if words <= leaf | doc:
        return 2
    return 3 if words <= _words(explanation.key) | doc else None


def _joined(found: Sequence[FoundKey]) -> tuple[FoundKey, ...]:
    """Keys with those of the same name and meaning elsewhere in one."""
    groups: list[list[FoundKey]] = []
    for each in found:
        for group in groups:
            first = group[0].explanation
            if _leaf(first) == _leaf(each.explanation) and _means_the_same(first, each.explanation):
                group.append(each)
                break
        else:
            groups.append([each])
    return tuple(
        FoundKey(
            group[0].explanation, group[0].condition, tuple(dict.fromkeys(other.explanation.key for other in group[1:]))
        )
        for group in groups
    )


def _leaf(explanation: Explanation) -> str:
    return explanation.key.rpartition(".")[2]


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower().removesuffix("s") for word in _WORD.findall(text))
