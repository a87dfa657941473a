"""Keys of earlier versions, with their values under the keys of this version.

A table in `Config.renamed` gives a function for each key that a section had. It translates the configs that runs of
earlier versions recorded. The messages about such keys in a user's file use the same results, so the two cannot
differ::

    renamed = {
        "learning_rate": moved("optimizer.lr"),
        "use_cispo": chosen("surrogate.name", "cispo"),
    }
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.config.dump import to_override
from rl_core.config.keys import Key
from rl_core.config.schema import Config, Rename
from rl_core.config.tree import Entry, KeyPath, format_path, leaves, natural, parse_path


def moved(key: str, *, unless: Any = ...) -> Rename:
    """Return the rename of a key whose values mean the same under another key.

    Args:
        key: The key of this version, relative to the section.
        unless: A value that means the absence of the setting, and needs no key.
    """
    return Rename(key, lambda value, _: {} if value == unless else {key: value})


def chosen(key: str, value: str) -> Rename:
    """Return the rename of a switch, which chose a value of a key if it was on."""
    return Rename(f"{key}={value} if true", lambda is_on, _: {key: value} if is_on else {})


@dataclass
class Upgrade:
    """The keys that differ between a config of an earlier version and a config of this version.

    Args:
        is_whole: True if a run recorded the config, so that it holds every key of its version.
        renamed: Keys of earlier versions.
        as_before: Keys that did not exist, with the values that keep the behaviour of their versions.
    """

    is_whole: bool = True
    renamed: list[str] = field(default_factory=list)
    as_before: dict[str, Any] = field(default_factory=dict)


def upgraded(entry: Entry, root: type[Config], *, is_whole: bool) -> tuple[Entry, Upgrade]:
    """Return a config of an earlier version under the keys of this version.

    Written keys of this version, such as overrides, take precedence over keys of earlier versions. A config that a run
    recorded has every key, so an absent key did not exist: it gets the value of `Config.before_it_existed`, if there is
    one.

    Args:
        entry: The config.
        root: The config type.
        is_whole: True if a run recorded it.

    Returns:
        The config, and the changes.
    """
    upgrade = Upgrade(is_whole)
    return _upgraded(Key((), root), entry, upgrade), upgrade


def replacement(section: type[Config], path: KeyPath, written: Any) -> tuple[str, str]:
    """Return the message about a key of an earlier version, for its value, and the remedy.

    Args:
        section: The section's type, which has the key in its `renamed`.
        path: Path of the key.
        written: Values of the section; without one for the key, the message is about the key in general.
    """
    *above, name = path
    rename = section.renamed[str(name)]
    if not isinstance(written, Mapping) or name not in written:
        return f"is now {format_path((*above, rename.now))}", ""
    values = rename.values(written[name], written)
    if not values:
        return "is a key of an earlier version, and this value needs no key", "Remove this line"
    for other, theirs in _others(section, str(name), written):
        for key in values.keys() & theirs.keys():
            if values[key] != theirs[key]:
                ours, others = (to_override(_below(above, key), each[key]) for each in (values, theirs))
                return f"is now {ours}, and {other} is {others}", "Keep one of the two"
    return f"is now {' '.join(to_override(_below(above, key), values[key]) for key in values)}", ""


def new_keys(section: type[Config], path: KeyPath, written: Any) -> list[str]:
    """Return the keys of this version that replace a key of an earlier version; see `replacement`."""
    *above, name = path
    return [_below(above, key) for key in section.renamed[str(name)].values(written[name], written)]


def _below(section: Iterable[str | int], key: str) -> str:
    return format_path((*section, *parse_path(key)))


def _others(section: type[Config], name: str, written: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the values under this version's keys of everything else in the section, by the key that is written."""
    for other, value in written.items():
        if other == name:
            continue
        if other in section.renamed:
            yield other, section.renamed[other].values(value, written)
        else:
            yield other, {format_path((other, *path)): leaf for path, leaf in leaves(value).items()}


def _upgraded(key: Key, entry: Entry, upgrade: Upgrade) -> Entry:
    written = natural(entry.plain())
    if isinstance(entry.value, list):
        items = [_child(key, index, item, written, upgrade) for index, item in enumerate(entry.value)]
        return Entry(items, entry.origin)
    if not isinstance(entry.value, dict):
        return entry
    section = key.section(written)
    if section is not None and (section.renamed or section.before_it_existed):
        entry = _of_this_version(section, entry, key.path, upgrade)
        if upgrade.is_whole:
            entry = _with_absent(section, entry, key.path, upgrade)
        written = natural(entry.plain())
    children = {name: _child(key, name, each, written, upgrade) for name, each in entry.value.items()}
    return Entry(children, entry.origin)


def _child(key: Key, segment: str | int, entry: Entry, written: Any, upgrade: Upgrade) -> Entry:
    child = key.child(segment, written)
    return entry if child is None else _upgraded(child, entry, upgrade)


def _of_this_version(section: type[Config], entry: Entry, path: KeyPath, upgrade: Upgrade) -> Entry:
    written = natural(entry.plain())
    new = Entry({name: each for name, each in entry.value.items() if name not in section.renamed}, entry.origin)
    for name, rename in section.renamed.items():
        if name not in written:
            continue
        for key, value in rename.values(written[name], written).items():
            if new.get(parse_path(key)) is None:
                new = new.with_entry(parse_path(key), Entry.of(value, entry.value[name].origin))
        if name not in section.model_fields:
            upgrade.renamed.append(format_path((*path, name)))
    return new


def _with_absent(section: type[Config], entry: Entry, path: KeyPath, upgrade: Upgrade) -> Entry:
    written, before = natural(entry.plain()), section.before_it_existed
    upgrade.as_before |= {
        format_path((*path, name)): each for name, each in before.items() if written.get(name, each) == each
    }
    absent = {name: each for name, each in before.items() if name not in written}
    return Entry({**entry.value, **Entry.of(absent, entry.origin).value}, entry.origin)
