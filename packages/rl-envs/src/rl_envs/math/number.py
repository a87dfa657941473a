"""Numbers as people write them, read exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from rl_envs.math.unit import read_unit, unwrapped

MAX_EXPONENT = 5000
"""Largest power of ten, or power of an integer, that is written out; a longer string is not read as a number."""
MAX_DIGITS = 100_000
"""Longest text that is read as a number."""

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"(?P<sign>[-+]?)(?P<digits>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d+))?")
_POWER = re.compile(r"(?P<base>[-+]?\d+)\^(?:\{(?P<braced>[-+]?\d+)\}|(?P<bare>\d))")
_SCIENTIFIC = re.compile(rf"(?P<digits>[-+]?(?:{_PLAIN}))(?:\\times|\\cdot|×|\*|x)(?P<power>10\^.*)")
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\\[dtc]?frac(?:\{(?P<a>[^{}]+)\}|(?P<a1>\d))(?:\{(?P<b>[^{}]+)\}|(?P<b1>\d))"
)
_MIXED = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d+)(?:\s+(?P<slash>\d+/\d+)|\s*(?P<latex>\\[dtc]?frac\s*\{?\d.*))")
_UNIT = re.compile(
    r"(?<=[\d})!])(?:\s*(?P<latex>\\(?:text|mathrm|mbox|textrm|operatorname)\s*\{[^{}]*\}.*)| (?P<word>[A-Za-zµΩ].*))$"
)
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,; !]|~|[\u00a0\u2009\u202f])\d{3})+(?!\d)")
_GROUP_GAP = re.compile(r"\\[,; !]|~|[\u00a0\u2009\u202f]")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)$")
_MULTIPLES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CURRENCY = re.compile(r"^([-+]?)\s*\\?(\$|€|£)\s*")
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound"}


@dataclass(frozen=True)
class Number:
    """An exact number.

    Args:
        value: Its value; for a percentage, the number before the sign.
        percent: True if a percent sign follows.
        unit: The unit, as `read_unit` returns it; empty if there is none.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""

    def equals(self, other: Number) -> bool:
        """Return whether both are the same number; a percentage equals its value (50% and 0.5) and its number (50% and
        50).

        Units must agree if both have one.
        """
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        mine, theirs = (n.value / 100 if n.percent else n.value for n in (self, other))
        return mine == theirs


def read_number(text: str) -> Number | None:
    """Read a string as a number: integer of any size, decimal, fraction, power, mixed number or percentage, with units.

    None if it is anything else, an expression included.
    """
    if len(text) > MAX_DIGITS or not any(character.isdigit() for character in text):
        return None
    text = text.strip().replace("−", "-").replace("–", "-").replace("{,}", ",").replace(r"\%", "%")
    text = _GROUPED.sub(lambda match: _GROUP_GAP.sub("", match[0]), text)
    text = re.sub(r"\\[,;:! ]|\\quad|~", " ", text).replace("\\left", "").replace("\\right", "").strip()
    text, symbol = _without_symbol(text)
    text, factor, unit, percent = _without_unit(text)
    value = _value(text)
    return None if value is None else Number(value * factor, percent, unit or symbol)


def _without_symbol(text: str) -> tuple[str, str]:
    """The text without a sign of degrees or of a currency, and the unit that the sign stands for."""
    if _DEGREES.search(text):
        return _DEGREES.sub("", text), "°"
    currency = _CURRENCY.match(text)
    if currency is None:
        return text, ""
    return _CURRENCY.sub(r"\1", text), _CURRENCIES[currency[2]]


def _without_unit(text: str) -> tuple[str, int, str, bool]:
    """The text before its unit, the factor of a unit like `million`, the unit, and whether it is percent."""
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].strip(), 1, "", True
    match = _UNIT.search(text)
    if match is None:
        return text, 1, "", False
    written = match["latex"] or match["word"]
    bare = text[: match.start()].strip()
    plain = unwrapped(written).lower()
    head, _, rest = plain.partition(" ")
    if head in _MULTIPLES:
        return bare, _MULTIPLES[head], read_unit(rest) or "", False
    if plain in ("percent", "per cent", "%"):
        return bare, 1, "", True
    unit = read_unit(written, is_marked=match["word"] is None)
    return (text, 1, "", False) if unit is None else (bare, 1, unit, False)


def _value(text: str) -> Fraction | None:
    text = text.strip()
    if mixed := _MIXED.fullmatch(text):
        part = _value((mixed["slash"] or mixed["latex"]).strip())
        if part is None or not 0 <= part < 1:
            return None
        whole = Fraction(Decimal(mixed["whole"])) + part
        return -whole if mixed["sign"] == "-" else whole
    if re.search(r"\d\s+[\d.]", text):
        return None
    text = re.sub(r"\s+", "", text)
    if len(text) > 2 and text[0] in "({" and text[-1] in ")}" and not set("(){},") & set(text[1:-1]):
        text = text[1:-1]
    readings = (read(text) for read in (_decimal, _power, _scientific, _fraction))
    return next((value for value in readings if value is not None), None)


def _decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    exponent = match["exponent"] or "0"
    if len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    # Decimal reads digits without the limit that int has
    digits = Fraction(Decimal(match["digits"].replace(",", "")))
    return (-digits if match["sign"] == "-" else digits) * Fraction(10) ** int(exponent)


def _power(text: str) -> Fraction | None:
    match = _POWER.fullmatch(text)
    if match is None:
        return None
    base, exponent = match["base"], match["braced"] or match["bare"]
    if len(base) > 20 or len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    if int(base) == 0:
        return Fraction(0) if int(exponent) > 0 else None
    # -2^2 is -(2^2)
    power = Fraction(abs(int(base))) ** int(exponent)
    return -power if base.startswith("-") else power


def _scientific(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return None
    digits, power = _decimal(match["digits"]), _power(match["power"])
    return None if digits is None or power is None else digits * power


def _fraction(text: str) -> Fraction | None:
    if match := _LATEX_FRACTION.fullmatch(text):
        sign = match["sign"]
        parts = (match["a"] or match["a1"], match["b"] or match["b1"])
    elif text.count("/") == 1:
        above, _, below = text.partition("/")
        sign, parts = "", (above, below)
    else:
        return None
    numerator, denominator = (_decimal(part) for part in parts)
    if numerator is None or not denominator:
        return None
    return -numerator / denominator if sign == "-" else numerator / denominator
