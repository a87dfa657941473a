"""Parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import TypeVar

from rl_core.errors import ConfigError

_Choice = TypeVar("_Choice", bound=str)


class Parameters:
    """Parameters of a request. Each may be given several times.

    Args:
        values: Values by name.
    """

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        """Return whether a parameter was given and is not empty."""
        return bool(self._values.get(name, [""])[-1])

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return list(self._values.get(name, ()))

    def text(self, name: str, default: str | None = None) -> str:
        """Return the last value of a parameter.

        Args:
            name: Name of the parameter.
            default: Value if it was not given; None if it is required.

        Raises:
            ConfigError: If it is required and was not given.
        """
        values = self._values.get(name)
        if values:
            return values[-1]
        if default is None:
            raise ConfigError(f"the parameter {name!r} is missing")
        return default

    def integer(self, name: str, default: int, *, least: int = -(2**53), most: int = 2**53) -> int:
        """Return a whole number.

        Args:
            name: Name of the parameter.
            default: Value if it was not given.
            least: Smallest allowed value.
            most: Largest allowed value.

        Raises:
            ConfigError: If it is not a whole number in the allowed range.
        """
        if not self.has(name):
            return default
        try:
            found = int(self.text(name))
        except ValueError:
            raise ConfigError(f"{name}: {self.text(name)!r} is not a whole number") from None
        if not least <= found <= most:
            raise ConfigError(f"{name}: {found} is not between {least} and {most}")
        return found

    def number(self, name: str, default: float) -> float:
        """Return a number; `default` if it was not given.

        Raises:
            ConfigError: If it is not a number.
        """
        if not self.has(name):
            return default
        try:
            found = float(self.text(name))
        except ValueError:
            found = nan
        if isnan(found):
            raise ConfigError(f"{name}: {self.text(name)!r} is not a number")
        return found

    def choice(self, name: str, allowed: Sequence[_Choice]) -> _Choice:
        """Return one of some values; the first of them if it was not given.

        Raises:
            ConfigError: If it is another value.
        """
        given = self.text(name, allowed[0])
        for each in allowed:
            if each == given:
                return each
        raise ConfigError(f"{name}: got {given!r}; allowed: {', '.join(allowed)}")
