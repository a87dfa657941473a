"""Conditions such as `sft.seed<3` or `reward=0`, on anything that has values by key."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from rl_core.config.tree import COMMAND_LINE, natural, read_value
from rl_core.errors import ConfigError

_CONDITION = re.compile(r"([^=!<>]*[^=!<>\s])\s*(!=|<=|>=|=|<|>)\s*(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}


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
        is_equal = any(each == self.value or _is_like(each, self.value) for each in several)
        return is_equal is (self.sign == "=")


def shown(value: Any) -> str:
    """A value in a cell of a table."""
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


def _is_like(found: Any, pattern: Any) -> bool:
    return isinstance(found, str) and fnmatchcase(found, str(pattern).replace("[", "[[]"))
