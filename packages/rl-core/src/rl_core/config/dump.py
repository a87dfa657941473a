"""Configs as YAML that loads back to an equal config, the keys that differ between two, and the rules of changes in a
run."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml

from rl_core.config.keys import key_at, keys_along, value_at
from rl_core.config.schema import Config, NamedConfig, NamesPath, WhenChanged, plain
from rl_core.config.tree import KeyPath, format_path, leaves, mapped, read_scalar
from rl_core.errors import show
from rl_core.user_code import is_in_file

_OPENING = re.compile(r"(\\*)\$\{")


class Absent(Enum):
    """The value of a key that one of two configs does not have."""

    ABSENT = "(not there)"


ABSENT = Absent.ABSENT
"""Marks a key that one of two compared configs does not have."""


@dataclass(frozen=True)
class Change:
    """A key whose values differ; `ABSENT` if only the other config has the key."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (value.value if isinstance(value, Absent) else show(value) for value in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"


def to_yaml(config: Config) -> str:
    """Return the whole config with its defaults, as `config.yaml` of a run directory holds it.

    Values from environment variables stay interpolations.
    """
    return tree_to_yaml(as_written(config))


def changed_to_yaml(config: Config) -> str:
    """Return the keys of a config whose values differ from their defaults, as YAML that loads back to it."""
    return tree_to_yaml(changed_as_written(config))


def changed_as_written(config: Config) -> dict[str, Any]:
    """Return the keys of a config whose values differ from their defaults, as nested plain values; see `as_written`."""
    found = _changed(config, None, as_written(config))
    assert isinstance(found, dict), "a whole config is no interpolation"
    return found


def _changed(section: Config, default: Any, written: Any) -> Any:
    """Return the written values of a section's keys that must be set or differ from a default section. If the default
    is of another type, they are compared with the defaults of the section's own type.
    """
    if not isinstance(written, dict):
        return written  # a whole section from an environment variable
    found = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if type(default) is type(section):
            usual = getattr(default, name)
        else:
            usual = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, Config):
            below = _changed(value, usual, written[name])
            is_other = type(usual) is not type(value)
            if is_other and isinstance(value, NamedConfig) and isinstance(written[name], dict):
                below = {"name": written[name]["name"], **below}
            if below or field.is_required() or is_other:
                found[name] = below
        elif isinstance(value, list | tuple) and any(isinstance(entry, Config) for entry in value):
            if value != usual:
                found[name] = [
                    _changed(entry, None, at) if isinstance(entry, Config) else at
                    for entry, at in zip(value, written[name], strict=True)
                ]
        elif field.is_required() or plain(value) != plain(usual):
            found[name] = written[name]
    return found


def tree_to_yaml(tree: Any) -> str:
    """Return nested plain values, such as the result of `as_written`, as YAML."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def to_override(key: str, value: Any) -> str:
    """Return `key=value` for the command line; see `as_written` for the value."""
    written = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return f"{key}={written.strip()[1:-1]}"


def diff(old: Config, new: Config) -> list[Change]:
    """Return the changes from one config to another, in the order of the keys; lists of another length are one change.

    Values from environment variables are compared as they are written: another value of the variable is not a change.
    """
    return [change for _, change in tree_changes(as_written(old), as_written(new))]


def as_written(config: Config) -> Any:
    """Return a config as nested plain values that read back to it, with the interpolations of environment variables in
    place of their values. These values are stored, uploaded and compared."""
    return with_references(escaped(plain(config)), config.references)


def escaped(tree: Any) -> Any:
    r"""Return nested values with every string in a form that is read back as it is: `${` as `\${`."""
    return mapped(tree, lambda _, value: _OPENING.sub(r"\1\1\\${", value) if isinstance(value, str) else value)


def with_references(values: Any, references: Mapping[KeyPath, str], path: KeyPath = ()) -> Any:
    """Return nested values with the interpolations of environment variables as they were written."""
    if path in references:
        return references[path]
    match values:
        case dict():
            return {key: with_references(item, references, (*path, key)) for key, item in values.items()}
        case list():
            return [with_references(item, references, (*path, index)) for index, item in enumerate(values)]
        case _:
            return values


def tree_changes(old: Any, new: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Change]]:
    """Yield the changes between nested plain values, by path."""
    match old, new:
        case dict(), dict():
            for key in [*old, *(key for key in new if key not in old)]:
                yield from tree_changes(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
        case list(), list() if len(old) == len(new) and any(isinstance(item, dict) for item in old):
            for index, pair in enumerate(zip(old, new, strict=True)):
                yield from tree_changes(*pair, (*path, index))
        case _ if type(old) is not type(new) or old != new:
            yield path, Change(format_path(path), old, new)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this project's reader, or a YAML 1.1 reader, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.replace("\n", "").isprintable():
        style = '"'
    elif "\n" in text:
        style = "|"
    elif type(read_scalar(text)) is not str:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


@dataclass(frozen=True)
class RuledChange:
    """A key whose values differ, and the use that a run may make of the new value."""

    change: Change
    rule: WhenChanged


def changed_keys(root: type[Config], old: Any, new: Any) -> list[RuledChange]:
    """Return the changes between two configs, in the order of the keys. Paths are equal if they refer to the same file.

    Args:
        root: Type of both.
        old: Nested plain values, such as the result of `as_written`.
        new: The same.
    """
    return [
        _strictest(root, path, change, new)
        for path, change in tree_changes(old, new)
        if not _name_the_same(change, is_path=_names_path(root, path, new))
    ]


def rule_of(root: type[Config], path: KeyPath, tree: Any) -> WhenChanged:
    """Return the rule for another value at a path: the closest one; without any, a change needs a branch.

    Args:
        root: Type of the whole config.
        path: Path of the key from the root.
        tree: Nested plain values, which decide among the members of a union.
    """
    rule = WhenChanged.BRANCH
    for key, value in keys_along(root, path, tree):
        own = next((mark for mark in key.marks if isinstance(mark, WhenChanged)), None)
        section = key.section(value)
        rule = own or (section.when_changed if section is not None else None) or rule
    return rule


def keys_when_changed(config: Config, rule: WhenChanged) -> dict[str, Any]:
    """Return the keys of a config that have this rule, with their values as they were written."""
    tree = as_written(config)
    return {
        format_path(path): value for path, value in leaves(tree).items() if rule_of(type(config), path, tree) is rule
    }


def with_absolute_paths(config: Config) -> Any:
    """Return the result of `as_written` with absolute paths of files and folders that exist, so that the recorded
    config of a run can be read from any folder."""
    tree, root = as_written(config), type(config)
    return mapped(tree, lambda path, value: _absolute(value) if _names_path(root, path, tree) else value)


def _strictest(root: type[Config], path: KeyPath, change: Change, tree: Any) -> RuledChange:
    """Return the change with its rule. A section that only one of the configs has gets its most restrictive rule."""
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


def _names_path(root: type[Config], path: KeyPath, tree: Any) -> bool:
    key = key_at(root, path, tree)
    return key is not None and any(isinstance(mark, NamesPath) for mark in key.marks)


def _name_the_same(change: Change, *, is_path: bool) -> bool:
    """Return whether two strings name one file, or one function or class in a file."""
    old, new = change.old, change.new
    if not (isinstance(old, str) and isinstance(new, str)) or not (is_path or (is_in_file(old) and is_in_file(new))):
        return False
    # `Path.expanduser` raises for an unknown user.
    first, second = (os.path.realpath(os.path.expanduser(text)) for text in (old, new))
    return first == second


def _absolute(value: Any) -> Any:
    # An interpolation or the text of a template is not a path.
    if not isinstance(value, str) or "{" in value or "\n" in value:
        return value
    path = os.path.abspath(os.path.expanduser(value))
    return path if next(glob.iglob(path), None) is not None else value
