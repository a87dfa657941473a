"""The keys in which a run's config differs from the one that it was started with, and what each change needs."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.config.dump import ABSENT, Change, as_written, tree_changes
from rl_core.config.keys import Key, value_at
from rl_core.config.schema import Config, NamesPath, WhenChanged
from rl_core.config.tree import KeyPath, format_path, leaves, mapped
from rl_core.user_code import is_in_file


@dataclass(frozen=True)
class RuledChange:
    """A key whose values differ, and what a run may do with the new value."""

    change: Change
    rule: WhenChanged


def changed_keys(root: type[Config], old: Any, new: Any) -> list[RuledChange]:
    """The changes between two configs, in the order of the keys. Paths are compared by what they name.

    Args:
        root: Type of both.
        old: Nested plain values, as `as_written` returns them.
        new: The same.
    """
    return [
        _strictest(root, path, change, new)
        for path, change in tree_changes(old, new)
        if not _name_the_same(change, is_path=_names_path(root, path, new))
    ]


def rule_of(root: type[Config], path: KeyPath, tree: Any) -> WhenChanged:
    """The rule for another value at a path: the one given closest to it, else a change needs a branch.

    Args:
        root: Type of the whole config.
        path: Path of the key from the root.
        tree: Nested plain values, which decide among the members of a union.
    """
    rule = WhenChanged.BRANCH
    for key, value in _along(root, path, tree):
        said = next((mark for mark in key.marks if isinstance(mark, WhenChanged)), None)
        section = key.section(value)
        rule = said or (section.when_changed if section is not None else None) or rule
    return rule


def keys_when_changed(config: Config, rule: WhenChanged) -> dict[str, Any]:
    """The keys of a config that have this rule, with their values as they were written."""
    tree = as_written(config)
    return {
        format_path(path): value for path, value in leaves(tree).items() if rule_of(type(config), path, tree) is rule
    }


def with_absolute_paths(config: Config) -> Any:
    """Same as `as_written`, with the paths of files and folders that exist made absolute: what a run keeps of its
    config can be read from any folder."""
    tree, root = as_written(config), type(config)
    return mapped(tree, lambda path, value: _absolute(value) if _names_path(root, path, tree) else value)


def _strictest(root: type[Config], path: KeyPath, change: Change, tree: Any) -> RuledChange:
    """The change with its rule; of a section that only one of the configs has, that of the key which needs most."""
    section = change.new if change.old is ABSENT else change.old if change.new is ABSENT else None
    if not isinstance(section, dict) or not section:
        return RuledChange(change, rule_of(root, path, tree))
    order = list(WhenChanged)
    rules = {below: rule_of(root, (*path, *below), tree) for below in leaves(section)}
    below, rule = max(rules.items(), key=lambda entry: order.index(entry[1]))
    if rule is not WhenChanged.NEW_RUN:
        return RuledChange(change, rule)
    value = value_at(section, below)
    pair = (ABSENT, value) if change.old is ABSENT else (value, ABSENT)
    return RuledChange(Change(format_path((*path, *below)), *pair), rule)


def _along(root: type[Config], path: KeyPath, tree: Any) -> Iterator[tuple[Key, Any]]:
    """The keys from the root to a path, each with its value, as far as the type knows them."""
    key: Key | None = Key((), root)
    for depth in range(len(path) + 1):
        if key is None:
            return
        value = value_at(tree, path[:depth])
        yield key, value
        key = key.child(path[depth], value) if depth < len(path) else None


def _names_path(root: type[Config], path: KeyPath, tree: Any) -> bool:
    *_, (last, _) = _along(root, path, tree)
    return last.path == path and any(isinstance(mark, NamesPath) for mark in last.marks)


def _name_the_same(change: Change, *, is_path: bool) -> bool:
    """Return whether two strings name one file, or one function or class in a file."""
    old, new = change.old, change.new
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    return (is_path or (is_in_file(old) and is_in_file(new))) and _real(old) == _real(new)


def _real(text: str) -> str:
    return os.path.realpath(os.path.expanduser(text))  # pathlib's raises for a user that is unknown


def _absolute(value: Any) -> Any:
    # neither an interpolation nor the text of a template is a path
    if not isinstance(value, str) or "{" in value or "\n" in value:
        return value
    path = os.path.abspath(os.path.expanduser(value))
    return path if next(glob.iglob(path), None) is not None else value
