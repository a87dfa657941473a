"""Numbers and units as people write them, and constant expressions, read exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from rl_envs.math.notation import MAX_LENGTH, canonical
from rl_envs.math.unit import MAX_LENGTH as MAX_UNIT
from rl_envs.math.unit import SIGNS, Unit, combined, read_unit, sized

_LONG = re.compile(r"(?P<sign>[-+]?)(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?)")
_REPEATING = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)\.(?P<fixed>\d*)"
    r"(?:\\(?:overline|bar)\s*\{(?P<line>\d+)\}|\\(?:overline|bar)\s*(?P<digit>\d)|\((?P<bracket>\d+)\)"
    r"|\\dot\s*\{?(?P<first>\d)\}?(?:(?P<middle>\d*)\\dot\s*\{?(?P<last>\d)\}?)?)"
)
_OVERLINES = re.compile(r"(?<=\})\\overline\{(\d)\}")
_ENDLESS = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)\.(?P<fixed>\d*?)(?:(?P<one>\d)(?P=one){2,}|(?P<cycle>\d{2,6})(?P=cycle)+)\.\.\."
)
_CURRENCY = re.compile(
    r"([-+]?)\s*\(?(US\$|R\$|[ACS]\$|[$€£¥₹₩₽₪₺₫₱₦฿₨]|(?:USD|EUR|GBP|JPY|CNY|RMB|INR|KRW|CHF|Rs\.?)(?![A-Za-z]))\s*([-+]?)"
    r"(?=[\d.(\\])"
)
_TAIL = re.compile(r"\\text\s*\{|(?<![\\A-Za-z])(?:[^\W\d_]+)|" + SIGNS)
_END = re.compile(r"[\d)}\]!.|]$|\\(?:pi|theta|alpha|beta)$|(?<![A-Za-z])[A-Za-z]$")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])|°")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*(\\text\{[^{}]*\}[^{}]*)\}\s*\{\s*(\\text\{[^{}]*\}(?:\^\{?-?\d\}?)?)\s*\}")
_SUM = re.compile(
    r"(\d+(?:\.\d+)?)\s*((?:\\text\s*\{)?[^\W\d_{}]+\}?|[°'\"])\.?(?:\s*,?\s*(?:\\text\s*\{)?\s*(?:and\b)?\}?\s*)"
)


@dataclass(frozen=True)
class Number:
    """An exact number with the units that it can have; none if it has no unit."""

    value: Fraction
    units: tuple[Unit, ...] = ()


def read_number(text: str) -> Number | None:
    """Read a whole string as a number: integer of any size, decimal, fraction, power, mixed number or percentage, with
    units. None if it is anything else."""
    if len(text) > MAX_LENGTH or not any(map(str.isnumeric, text)):
        return None
    return number_in(canonical(text))


def number_in(text: str) -> Number | None:
    """Read a number in canonical notation."""
    if len(text) > MAX_LENGTH:
        return None
    if (value := plain_value(text)) is not None:
        return Number(value)
    if (total := _sum(text)) is not None:
        return total
    split = split_unit(text)
    value = None if split is None else plain_value(split[0])
    return None if value is None or split is None else Number(value * split[1][0].count, counted(split[1]))


def counted(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return units without the factor in words before them; none if there is nothing else."""
    return tuple(replace(unit, count=Fraction(1)) for unit in units if unit.powers)


def plain_value(text: str) -> Fraction | None:
    """Return the value of a number or constant expression without a unit."""
    if (long := _LONG.fullmatch(text)) is not None:
        # Decimal reads digits without the limit that int has.
        digits = Fraction(Decimal(long["digits"].replace(",", "")))
        return -digits if long["sign"] == "-" else digits
    if (repeating := _repeating(text)) is not None:
        return repeating
    return exact_value(text)


def split_unit(text: str) -> tuple[str, tuple[Unit, ...]] | None:
    """Return an expression in canonical notation without its unit, and the units that this can be; None without one."""
    text = _UNIT_FRACTION.sub(r"\1/\2", text)
    prefix: tuple[Unit, ...] = ()
    if (currency := _CURRENCY.match(text)) is not None:
        prefix = read_unit(currency[2])
        text = (currency[1] or currency[3]) + text[currency.end() :]
    for tail in _TAIL.finditer(text, max(0, len(text) - MAX_UNIT)):
        body = text[: tail.start()].rstrip()
        if _END.search(body[-20:]) is None or not _can_begin(text, tail, body):
            continue
        units = read_unit(text[tail.start() :], is_marked=text.startswith("\\", tail.start()))
        if units:
            return body, combined(prefix, units)
    return (text.strip(), prefix) if prefix else None


def _can_begin(text: str, tail: re.Match[str], body: str) -> bool:
    """Return whether a unit can begin at a place: one letter directly after a number is a variable, and so is one
    letter after an expression with variables."""
    if tail[0] in "°'\"" and (_ANGLE.search(body) or (tail[0] != "°" and not body[-1].isdigit())):
        return False
    if len(tail[0]) > 1 or not tail[0].isalpha() or "/" in text[tail.start() :]:
        return body.count("{") == body.count("}") and body.count("(") == body.count(")")
    has_variables = re.search(r"(?<![\\A-Za-z])[A-Za-z]", body) is not None
    return text[tail.start() - 1].isspace() and not has_variables


def _sum(text: str) -> Number | None:
    """Return a quantity in several units, such as `5 ft 3 in` and `2 hours and 30 minutes`, in the smallest of them."""
    parts = list(_SUM.finditer(text)) if len(text) < MAX_UNIT else []
    if len(parts) < 2 or "".join(part[0] for part in parts) != text:
        return None
    choices = [read_unit(part[2]) for part in parts]
    if not all(choices):
        return None
    # The marks of feet and inches are also used for minutes and seconds of an angle.
    last = choices[-1][0 if "°" in text else -1]
    found = [[unit for unit in units if unit.powers == last.powers] for units in choices]
    if not all(found):
        return None
    sizes = [units[0].size for units in found]
    if sorted(sizes, reverse=True) != sizes or len(set(sizes)) < len(sizes):
        return None
    total = sum(Fraction(part[1]) * size for part, size in zip(parts, sizes, strict=True))
    return Number(total / sizes[-1], (found[-1][0],))


def _repeating(text: str) -> Fraction | None:
    if len(text) > 100:
        return None
    match = _REPEATING.fullmatch(_OVERLINES.sub(r"\\overline{\1}", text)) or _ENDLESS.fullmatch(text)
    if match is None:
        return None
    found = match.groupdict()
    cycle = found.get("line") or found.get("digit") or found.get("bracket") or found.get("one") or found.get("cycle")
    cycle = cycle or (found["first"] or "") + (found["middle"] or "") + (found["last"] or "")
    fixed = found["fixed"]
    size = Fraction(int((found["whole"] or "0") + fixed), 10 ** len(fixed))
    size += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return -size if found["sign"] == "-" else size


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_SPOKEN = {word: value for value, word in enumerate(_ONES.split())}
_SPOKEN |= {
    word: 10 * tens
    for tens, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}


def spoken_value(words: str) -> Fraction | None:
    """Return the value of a number in words, such as `twenty-one`, `minus three` and `two thirds`; None for others."""
    parts = [word for word in re.split(r"[ -]+", words.casefold()) if word != "and"]
    negative = bool(parts) and parts[0] in ("minus", "negative")
    total, current, seen = 0, 0, False
    for index, word in enumerate(parts[negative:]):
        if word in _SPOKEN or (word in ("a", "an") and index == 0 and len(parts) > 1):
            step = _SPOKEN.get(word, 1)
            if current % 100 and not (step < 10 and current % 10 == 0 and current % 100 >= 20):
                return None
            current, seen = current + step, True
        elif (size := sized(word)) is None or not seen:
            return None
        elif size == 100:
            current *= 100
        elif size > 1:
            total, current = total + current * int(size), 0
        elif index == len(parts) - 1 - negative:
            value = (total + current) * size
            return -value if negative else value
        else:
            return None
    return Fraction(-(total + current) if negative else total + current) if seen else None


MAX_EXPRESSION = 2000
"""Maximum length of a constant expression; longer numbers are read without it."""
MAX_DEPTH = 30
"""Maximum number of nested brackets."""
MAX_BITS = 40_000
"""Largest numerator or denominator, in bits; an expression beyond it has no exact value here."""
MAX_FACTORIAL = 2000

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4}(?![\d.]))?)"
    r"|(?P<frac>\\frac)|(?P<binom>\\binom)|(?P<times>\\cdot|\\times|\*|x(?=\s*10\^))|(?P<over>/)"
    r"|(?P<sign>[-+])|(?P<power>\^)|(?P<bang>!)|(?P<open>[({\[])|(?P<close>[)}\]]))"
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class NotExact(ValueError):
    """The string is not a constant expression with an exact value, or is too large."""


def exact_value(text: str) -> Fraction | None:
    """Return the value of a constant expression in canonical notation; None for anything else.

    White space between two digits does not multiply: `1 2` has no value.
    """
    if len(text) > MAX_EXPRESSION or not any(character.isdigit() for character in text):
        return None
    try:
        return _Reader(text).whole()
    except (NotExact, ZeroDivisionError):
        return None


class _Reader:
    """Recursive descent over the tokens of an expression."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise NotExact(text[position:])
            self._tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            position = match.end()
        self._at = 0
        self._depth = 0

    def whole(self) -> Fraction:
        """Return the value of all tokens."""
        value = self._sum()
        if self._at < len(self._tokens):
            raise NotExact("more follows")
        return value

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        if self._at >= len(self._tokens):
            raise NotExact("something is missing")
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _sum(self) -> Fraction:
        # The sign of a mixed number belongs to all of it.
        negative = self._kind() == "sign" and self._take() == "-"
        total = -self._product() if negative else self._product()
        while self._kind() == "sign":
            sign = self._take()
            term = self._product()
            total = _bounded(total + term if sign == "+" else total - term)
        return total

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            kind = self._kind()
            if kind == "times":
                self._take()
                value = _bounded(value * self._signed())
            elif kind == "over":
                self._take()
                value = _bounded(value / self._signed())
            elif kind == "frac" and self._tokens[self._at - 1][0] == "number":
                # This is a mixed number such as `3\frac{1}{2}`.
                part = self._power()
                if value.denominator != 1 or value < 0 or not 0 <= part < 1:
                    raise NotExact("not a mixed number")
                value += part
            elif (kind == "open" and self._tokens[self._at][1] == "(") or (
                kind in ("open", "frac", "binom") and self._tokens[self._at - 1][0] == "close"
            ):
                # A bracket, and anything after a bracket, is multiplied without a sign.
                value = _bounded(value * self._power())
            elif kind == "number":
                value += self._slashed()
            else:
                return value

    def _slashed(self) -> Fraction:
        """Return the fraction of a mixed number such as `3 1/2`."""
        tokens = self._tokens[self._at - 1 : self._at + 3]
        kinds = [kind for kind, _ in tokens]
        if kinds != ["number", "number", "over", "number"] or not all(tokens[i][1].isdigit() for i in (0, 1, 3)):
            raise NotExact("two numbers side by side")
        above, _, below = self._take(), self._take(), self._take()
        part = Fraction(_digits(above), _digits(below))
        if not 0 <= part < 1:
            raise NotExact("not a mixed number")
        return part

    def _signed(self) -> Fraction:
        if self._kind() != "sign":
            return self._power()
        sign = self._take()
        value = self._deeper(self._signed)
        return value if sign == "+" else -value

    def _power(self) -> Fraction:
        value = self._atom()
        while self._kind() == "bang":
            self._take()
            if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
                raise NotExact("not a factorial within bounds")
            value = Fraction(math.factorial(int(value)))
        if self._kind() != "power":
            return value
        self._take()
        exponent = self._deeper(self._argument)
        if exponent.denominator != 1:
            raise NotExact("a root")
        size = max(value.numerator.bit_length(), value.denominator.bit_length())
        if abs(exponent) * size > MAX_BITS:
            raise NotExact("too large")
        return value ** int(exponent)

    def _atom(self) -> Fraction:
        kind, text = self._kind(), self._take()
        if kind == "number":
            return _number(text)
        if kind == "open":
            value = self._deeper(self._sum)
            if self._take() != _CLOSING[text]:
                raise NotExact("brackets that do not match")
            return value
        if kind == "frac":
            above = self._argument()
            return _bounded(above / self._argument())
        if kind == "binom":
            n, k = self._argument(), self._argument()
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= MAX_FACTORIAL:
                raise NotExact("not a binomial within bounds")
            return Fraction(math.comb(int(n), int(k)))
        raise NotExact(text)

    def _argument(self) -> Fraction:
        """Return the value of one argument of LaTeX: a group, or the single digit that follows."""
        kind = self._kind()
        if kind == "sign":
            return self._signed()
        if kind == "frac" or (kind == "open" and self._tokens[self._at][1] == "{"):
            return self._atom()
        text = self._take()
        if kind != "number":
            raise NotExact(text)
        if len(text) > 1:  # LaTeX has `\frac12` and `2^10`.
            if self._tokens[max(0, self._at - 2)][0] == "power":
                return _number(text)
            self._at -= 1
            self._tokens[self._at : self._at + 1] = [("number", text[0]), ("number", text[1:])]
            self._at += 1
        return _number(text[0])

    def _deeper(self, read: Callable[[], Fraction]) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotExact("nested too deeply")
        value = read()
        self._depth -= 1
        return value


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().replace(",", "").partition("e")
    digits, _, decimals = mantissa.partition(".")
    return Fraction(_digits(digits + decimals), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)


def _digits(text: str) -> int:
    if len(text) > MAX_EXPRESSION:
        raise NotExact("too long")
    return int(text or "0")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotExact("too large")
    return value
