"""In which keys two configs differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rl_core.config.key_path import KeyPath, format_path
from rl_core.config.references import as_written
from rl_core.config.schema import Config
from rl_core.config.verdict import show


class Absent(Enum):
    """The value of a key that one of two configs does not have."""

    ABSENT = "(not there)"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Change:
    """A key whose values differ; `ABSENT` where only the other config has the key."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (value.value if isinstance(value, Absent) else show(value) for value in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"


def diff(old: Config, new: Config) -> list[Change]:
    """The changes from one config to another, in the order of the keys; lists of another length are one change.

    Values from environment variables are compared as they are written: another value of the variable is not a change.
    """
    return list(_changes((), as_written(old), as_written(new)))


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
