"""Configs as YAML that loads back to an equal config, and the keys in which two differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml

from rl_core.config.messages import show
from rl_core.config.schema import Config, plain
from rl_core.config.tree import KeyPath, format_path, mapped, read_scalar

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
    return yaml.dump(as_written(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def diff(old: Config, new: Config) -> list[Change]:
    """The changes from one config to another, in the order of the keys; lists of another length are one change.

    Values from environment variables are compared as they are written: another value of the variable is not a change.
    """
    return list(_changes((), as_written(old), as_written(new)))


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


def _changes(path: KeyPath, old: Any, new: Any) -> Iterator[Change]:
    match old, new:
        case dict(), dict():
            for key in [*old, *(key for key in new if key not in old)]:
                yield from _changes((*path, key), old.get(key, ABSENT), new.get(key, ABSENT))
        case list(), list() if len(old) == len(new) and any(isinstance(item, dict) for item in old):
            for index, pair in enumerate(zip(old, new, strict=True)):
                yield from _changes((*path, index), *pair)
        case _ if type(old) is not type(new) or old != new:
            yield Change(format_path(path), old, new)


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
