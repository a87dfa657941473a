"""Configs as YAML that loads back to an equal config, and the keys in which two differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml

from rl_core.config.schema import Config, plain
from rl_core.config.signature import NamedConfig
from rl_core.config.tree import KeyPath, format_path, mapped, read_scalar
from rl_core.problems import show

_OPENING = re.compile(r"(\\*)\$\{")


class Absent(Enum):
    """The value of a key that one of two configs does not have."""

    ABSENT = "(not there)"


ABSENT = Absent.ABSENT


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
    """The whole config with its defaults, as `config.yaml` of a run directory holds it.

    Values from environment variables stay interpolations.
    """
    return tree_to_yaml(as_written(config))


def changed_to_yaml(config: Config) -> str:
    """The keys of a config whose values differ from their defaults, as YAML that loads back to an equal config."""
    return tree_to_yaml(changed_as_written(config))


def changed_as_written(config: Config) -> dict[str, Any]:
    """The keys of a config whose values differ from their defaults, as nested plain values like `as_written`'s."""
    found = _changed(config, None, as_written(config))
    assert isinstance(found, dict), "a whole config is no interpolation"
    return found


def _changed(section: Config, default: Any, written: Any) -> Any:
    """The written values of a section's keys that must be set or differ from a default section, or if that is of
    another type, from the defaults of the section's own type.
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
    """Nested plain values, as `as_written` returns them, as YAML."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def to_override(key: str, value: Any) -> str:
    """`key=value` as it is given on the command line, for a value as `as_written` has it."""
    written = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return f"{key}={written.strip()[1:-1]}"


def diff(old: Config, new: Config) -> list[Change]:
    """The changes from one config to another, in the order of the keys; lists of another length are one change.

    Values from environment variables are compared as they are written: another value of the variable is not a change.
    """
    return [change for _, change in tree_changes(as_written(old), as_written(new))]


def as_written(config: Config) -> Any:
    """A config as nested plain values that read back to it, with the interpolations of environment variables in place
    of their values: what is stored, uploaded and compared."""
    tree = escaped(plain(config))
    for path, text in config.references.items():
        tree = _replaced(tree, path, text)
    return tree


def escaped(tree: Any) -> Any:
    r"""Nested values with every text in a form that is read back as it is: `${` as `\${`."""
    return mapped(tree, lambda _, value: _OPENING.sub(r"\1\1\\${", value) if isinstance(value, str) else value)


def _replaced(tree: Any, path: KeyPath, text: str) -> Any:
    if not path:
        return text
    head, *rest = path
    match tree:
        case dict() if head in tree:
            return {**tree, head: _replaced(tree[head], tuple(rest), text)}
        case list() if isinstance(head, int) and head < len(tree):
            return [_replaced(item, tuple(rest), text) if index == head else item for index, item in enumerate(tree)]
        case _:
            return tree


def tree_changes(old: Any, new: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Change]]:
    """The changes between nested plain values, by path."""
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
    """Quotes every text that this project's reader, or a YAML 1.1 reader, would take for something else."""

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
