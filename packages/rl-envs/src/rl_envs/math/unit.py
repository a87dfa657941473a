"""Units of quantities, with their powers."""

from __future__ import annotations

import re
from collections import Counter

MAX_LENGTH = 60
"""Longest string that is read as a unit."""

_WRAPPER = re.compile(r"\\(?:text|mathrm|mbox|textrm|operatorname)\s*\{([^{}]*)\}")
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-zµΩ°]+)|\^\s*(?:\{\s*(?P<braced>-?\d+)\s*\}|(?P<bare>-?\d))|(?P<over>/)"
    r"|(?P<times>\\cdot|\\times|[·*⋅]))"
)
_SYMBOLS = set("mgshLlNJWVAKCFT")
"""Units of one letter; other letters after a number are variables."""
_NOT_UNITS = {
    *("pi", "and", "or", "to", "inf", "infinity", "mod", "sqrt", "dozen", "hundred"),
    *("if", "is", "not", "as", "for", "where", "when"),
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NAMES = {
    "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres",
    "km": "kilometer kilometers kilometre kilometres",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "L": "liter liters litre litres l",
    "in": "inch inches",
    "ft": "foot feet",
    "mi": "mile miles",
    "°": "degree degrees",
}
_SAME = {name: symbol for symbol, names in _NAMES.items() for name in names.split()}
_COMPOUND = {"mph": ("mi", "h"), "kph": ("km", "h")}


def unwrapped(text: str) -> str:
    """Return a unit without the commands that set it upright."""
    return " ".join(_WRAPPER.sub(r" \1 ", text).split())


def read_unit(text: str, *, is_marked: bool = True) -> str | None:
    """Return a unit in one form, such as `m s^-2` for `m/s^2` and for `meters per second^2`; None if it is not a unit.

    Args:
        text: Unit as a response writes it.
        is_marked: True if it is set as text; otherwise one letter must be the symbol of a unit.
    """
    text = unwrapped(text)
    if not text or len(text) > MAX_LENGTH:
        return None
    powers: Counter[str] = Counter()
    position, sign, power, last = 0, 1, 1, ""
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position = match.end()
        name = match["name"] or ""
        lower = name.lower()
        if lower in _NOT_UNITS or (len(name) == 1 and not is_marked and name not in _SYMBOLS):
            return None
        if match["over"] or lower == "per":
            sign = -1
        elif lower in _POWERS:
            power = _POWERS[lower]
        elif lower in _COMPOUND:
            above, below = _COMPOUND[lower]
            powers.update({above: sign, below: -sign})
        elif name:
            last = _symbol(name)
            powers[last] += sign * power
            power = 1
        elif match["times"] is None:
            if not last:
                return None
            # the name has counted once already
            powers[last] += sign * (int(match["braced"] or match["bare"]) - 1)
    written = (f"{name}^{power}" if power != 1 else name for name, power in sorted(powers.items()) if power)
    return " ".join(written) or None


def _symbol(name: str) -> str:
    """One name for units that mean the same; symbols are case-sensitive, words are not and have no plural."""
    lower = name.lower()
    if lower in _SAME and (len(name) > 1 or name == "l"):
        return _SAME[lower]
    if len(name) < 3:
        return name
    return lower[:-1] if lower.endswith("s") and not lower.endswith("ss") else lower
