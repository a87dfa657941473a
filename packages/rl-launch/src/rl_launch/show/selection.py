"""Conditions on values by key, and the rollouts that `rl show` selects by them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

from rl_core.config import did_you_mean
from rl_core.config.keys import value_at
from rl_core.config.tree import COMMAND_LINE, natural, read_value
from rl_core.errors import ConfigError
from rl_core.rollouts.record import turns_of
from rl_launch.run_session.rollouts.rollout_store import Kind

_CONDITION = re.compile(r"([^=!<>]*[^=!<>\s])\s*(!=|<=|>=|=|<|>)\s*(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip

_LONG = frozenset({"prompt", "turns", "segments", "rewards", "row", "info", "verdicts", "weight_spans"})
"""Entries of a record that nobody compares as a whole."""


class HasValues(Protocol):
    """Values by key; None for a key that it does not have."""

    def __getitem__(self, key: str, /) -> Any: ...


@dataclass(frozen=True)
class Condition:
    """A condition on the value of a key.

    Args:
        key: Key of the value.
        sign: `=`, `!=`, `<`, `<=`, `>` or `>=`.
        value: A plain value; a string can contain `*` and `?`, which match any string and any character.
    """

    key: str
    sign: str
    value: Any

    @classmethod
    def parse(cls, text: str, option: str, example: str) -> Condition:
        """Read a condition.

        Args:
            text: As it was typed.
            option: That it was typed after, for the message.
            example: Of a condition, for the message.

        Raises:
            ConfigError: If it is not one.
        """
        found = _CONDITION.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{option}: got {text!r}; write KEY=VALUE, such as {example} (also !=, <, <=, >, >=)")
        key, sign, value = found.groups()
        return cls(key, sign, natural(read_value(value, COMMAND_LINE).plain()))

    def __str__(self) -> str:
        return f"{self.key}{self.sign}{shown(self.value)}"

    def holds(self, values: HasValues) -> bool:
        """Return whether it holds; an order never holds for a value that is missing or of another kind. Of several
        values, one that is equal suffices.
        """
        found = values[self.key]
        if self.sign in _ORDERS:
            is_number = isinstance(found, int | float) and isinstance(self.value, int | float)
            return is_number and _ORDERS[self.sign](found, self.value)
        several = found if isinstance(found, list) and not isinstance(self.value, list) else [found]
        is_equal = any(
            each == self.value or (isinstance(each, str) and fnmatchcase(each, str(self.value).replace("[", "[[]")))
            for each in several
        )
        return is_equal is (self.sign == "=")


def shown(value: Any) -> str:
    """Return a value in a cell of a table."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case list():
            return ", ".join(map(shown, value))
        case _:
            return str(value)


class RecordValues:
    """Values of a rollout's record by key.

    A key is `reward`, `response` (the text of all turns), an entry of the record (`status`, `num_sampled`,
    `environment`), or a path into one: `rewards.format`, `row.answer`, `info.accuracy`.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def __getitem__(self, key: str) -> Any:
        if key == "reward":
            return None if self._record.get("status") == "failed" else reward_of(self._record)
        if key == "response":
            return response_of(self._record)
        return value_at(self._record, tuple(key.split(".")))


@dataclass(frozen=True)
class Selection:
    """Selection of the rollouts to show.

    Args:
        kind: Training rollouts or validation rollouts.
        conditions: Conditions that must all hold.
        sort: Key that orders them, descending if it begins with `-`; those without a value come last. Empty
            for the order of the file.
        limit: Maximum number of rollouts to show.
    """

    kind: Kind = "step"
    conditions: Sequence[Condition] = ()
    sort: str = ""
    limit: int = 10

    @property
    def is_a_choice(self) -> bool:
        """True if single rollouts are asked for, in place of the best and the worst."""
        return bool(self.conditions or self.sort)

    def of(self, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return all records that are asked for, in order.

        Raises:
            ConfigError: If no record has a key.
        """
        holding = [replace(each, key=_known(each.key, records, "--where")) for each in self.conditions]
        found = [record for record in records if all(each.holds(RecordValues(record)) for each in holding)]
        if not self.sort:
            return found
        key = _known(self.sort.removeprefix("-"), records, "--sort")
        missing = [record for record in found if RecordValues(record)[key] is None]
        there = [record for record in found if RecordValues(record)[key] is not None]
        there.sort(key=lambda record: _rank(RecordValues(record)[key]), reverse=self.sort.startswith("-"))
        return [*there, *missing]


def _known(key: str, records: Sequence[Mapping[str, Any]], option: str) -> str:
    """Return the key, or the path that ends in it: `rewards.format` for `format`."""
    known = {"reward", "response", *(name for record in records for name in _keys_of(record))}
    if not records or key in known:
        return key
    found = [path for path in (f"rewards.{key}", f"row.{key}", f"info.{key}") if path in known]
    if len(found) == 1:
        return found[0]
    shown = sorted(name for name in known if name not in _LONG)
    raise ConfigError(f"{option}: no rollout has {key!r}{did_you_mean(key, shown)}; keys: {', '.join(shown)}")


def _keys_of(value: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, below in value.items():
        yield f"{above}{name}"
        if isinstance(below, Mapping):
            yield from _keys_of(below, f"{above}{name}.")


def reward_of(record: Mapping[str, Any]) -> float:
    """Return the reward of a rollout that has not failed."""
    rewards = record.get("rewards") or {}
    return float(rewards.get("reward", sum(rewards.values())))


def response_of(record: Mapping[str, Any]) -> str:
    """Return the text of all turns."""
    return "\n".join(str(turn.get("text", "")) for turn in turns_of(record))


def _rank(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, bool | int | float)
    return not is_number, float(value) if is_number else 0.0, "" if is_number else str(value)
