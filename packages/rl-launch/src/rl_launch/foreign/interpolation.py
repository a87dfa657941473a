"""Compute OmegaConf interpolations in configs of other systems: keys, arithmetic and defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rl_core.config.tree import MAX_BYTES, MAX_DEPTH, MAX_DIGITS
from rl_core.errors import ConfigError
from rl_core.problems import show
from rl_launch.foreign.scalars import scalar

_VARIABLE = "oc.env"
_RESOLVER = re.compile(r"([A-Za-z_][\w.]*):")
_SEGMENT = re.compile(r"[^.\[\]]+")
_MISSING = object()
_MAX_STEPS = 10_000
"""Maximum number of interpolations and values that are read to compute those of a file."""


def _quotient(left: Any, right: Any) -> Any:
    return left // right if left % right == 0 else left / right


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "sub": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "div": _quotient,
    "max": max,
    "min": min,
    "eval": lambda value: value,
}
"""Resolvers that recipes use."""


class _Problem(Exception):
    """An interpolation that cannot be computed, and the reason."""


def interpolated(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the values with every interpolation computed. Interpolations of environment variables are kept, because
    they belong to the machine and not to the recipe.

    Args:
        values: Nested plain values.
        name: Name of the file, for messages.

    Raises:
        ConfigError: If interpolations cannot be computed; lists all of them.
    """
    tree = _Tree(values)
    problems: list[str] = []

    def below(value: Any, path: tuple[str | int, ...]) -> Any:
        match value:
            case dict():
                return {key: below(item, (*path, key)) for key, item in value.items()}
            case list():
                return [below(item, (*path, index)) for index, item in enumerate(value)]
            case str() if "${" in value:
                try:
                    return tree.computed(value, path, ())
                except _Problem as problem:
                    problems.append(f"{'.'.join(map(str, path))}: {show(value)} {problem}")
                    return None
            case _:
                return value

    found: dict[str, Any] = below(values, ())
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return found


class _Tree:
    """The values that interpolations refer to."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._num_steps = self._num_characters = self._depth = 0

    def computed(self, text: str, path: tuple[str | int, ...], under_way: tuple[str, ...]) -> Any:
        """Return the value of a string: of a single interpolation, or the string with all interpolations replaced."""
        self._num_characters += len(text)
        self._count_step()
        self._depth += 1
        try:
            parts = list(_parts(text))
            values = [self._part(part, path, under_way) if is_inner else part for part, is_inner in parts]
        finally:
            self._depth -= 1
        return values[0] if len(values) == 1 else "".join(map(_shown, values))

    def _count_step(self) -> None:
        """Refuse interpolations that stand for very much: each level of `${a}${a}` doubles them."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS or self._num_characters > MAX_BYTES or self._depth > MAX_DEPTH:
            raise _Problem("leads to too many interpolations. Write the value instead")

    def _part(self, inner: str, path: tuple[str | int, ...], under_way: tuple[str, ...]) -> Any:
        resolver = _RESOLVER.match(inner)
        if resolver is None:
            key = str(self.computed(inner, path, under_way)) if "${" in inner else inner
            return self._named(key.strip(), path, under_way)
        name, arguments = resolver[1], inner[resolver.end() :]
        if name == _VARIABLE:
            return f"${{{inner}}}"
        values = [self._argument(each.strip(), path, under_way) for each in _arguments(arguments)]
        if name == "oc.select":
            try:
                return self._named(str(values[0]), path, under_way)
            except _Problem:
                return values[1] if len(values) > 1 else None
        if name not in _ARITHMETIC:
            raise _Problem(f"uses the unknown resolver {name!r}. Write the value instead")
        try:
            if not all(isinstance(each, int | float) for each in values) and name != "eval":
                raise TypeError
            found = _ARITHMETIC[name](*values)
            if isinstance(found, int) and abs(found) >= 10**MAX_DIGITS:
                raise OverflowError
            return found
        except (TypeError, ArithmeticError):
            given = ", ".join(map(_quoted, values))
            raise _Problem(f"cannot be computed from {given}. Write the value instead") from None

    def _argument(self, text: str, path: tuple[str | int, ...], under_way: tuple[str, ...]) -> Any:
        return self.computed(text, path, under_way) if "${" in text else scalar(text.strip("'\""))

    def _named(self, key: str, path: tuple[str | int, ...], under_way: tuple[str, ...]) -> Any:
        dots = len(key) - len(key.lstrip("."))
        base = path[: len(path) - dots] if dots else ()
        target = (*base, *(int(each) if each.isdecimal() else each for each in _SEGMENT.findall(key)))
        name = ".".join(map(str, target))
        if name in under_way:
            raise _Problem("is circular")
        value = self._at(target)
        if value is _MISSING:
            raise _Problem(f"refers to {name}, which is not in the file")
        return self._whole(value, target, (*under_way, name))

    def _whole(self, value: Any, path: tuple[str | int, ...], under_way: tuple[str, ...]) -> Any:
        self._count_step()
        match value:
            case str() if "${" in value:
                return self.computed(value, path, under_way)
            case dict():
                return {key: self._whole(item, (*path, key), under_way) for key, item in value.items()}
            case list():
                return [self._whole(item, (*path, index), under_way) for index, item in enumerate(value)]
            case _:
                return value

    def _at(self, path: tuple[str | int, ...]) -> Any:
        found: Any = self._values
        for segment in path:
            if isinstance(found, str) and found.startswith("${"):
                found = self.computed(found, (), ())
            match found:
                case dict():
                    found = found.get(segment, found.get(str(segment), _MISSING))
                case list() if isinstance(segment, int) and segment < len(found):
                    found = found[segment]
                case _:
                    return _MISSING
        return found


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a string, each with True if it is the inside of an interpolation."""
    plain, place = "", 0
    while place < len(text):
        if text.startswith("${", place) and not text.startswith("\\", place - 1 if place else 0):
            if plain:
                yield plain, False
            end = _end(text, place)
            yield text[place + 2 : end], True
            plain, place = "", end + 1
        else:
            plain += text[place]
            place += 1
    if plain:
        yield plain, False


def _end(text: str, start: int) -> int:
    """Return the index of the closing brace of the interpolation that starts at `start`."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if not depth:
                return place
    raise _Problem("has no closing brace")


def _arguments(text: str) -> list[str]:
    found, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _quoted(value: Any) -> str:
    return show(value) if isinstance(value, int | list | dict) else repr(value)[:80]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
