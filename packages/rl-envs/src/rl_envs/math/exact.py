"""Exact values of constant expressions: sums, products, fractions, integer powers, factorials and binomials."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 2000
"""Maximum length of an expression; longer numbers are read elsewhere."""
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
    if len(text) > MAX_LENGTH or not any(character.isdigit() for character in text):
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
        # the sign of a mixed number belongs to all of it
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
                value += self._mixed(value)
            elif self._multiplies(kind):
                value = _bounded(value * self._power())
            elif kind == "number":
                value += self._slashed(value)
            else:
                return value

    def _multiplies(self, kind: str) -> bool:
        """Return whether what follows is multiplied without a sign: a bracket, or anything after a bracket."""
        if kind == "open" and self._tokens[self._at][1] == "(":
            return True
        return kind in ("open", "frac", "binom") and self._tokens[self._at - 1][0] == "close"

    def _mixed(self, whole: Fraction) -> Fraction:
        r"""The fraction of a mixed number such as `3\frac{1}{2}`."""
        part = self._power()
        if whole.denominator != 1 or whole < 0 or not 0 <= part < 1:
            raise NotExact("not a mixed number")
        return part

    def _slashed(self, whole: Fraction) -> Fraction:
        """The fraction of a mixed number such as `3 1/2`."""
        tokens = self._tokens[self._at - 1 : self._at + 3]
        kinds = [kind for kind, _ in tokens]
        if kinds != ["number", "number", "over", "number"] or not all(
            tokens[index][1].isdigit() for index in (0, 1, 3)
        ):
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
        base = value
        if self._kind() != "power":
            return base
        self._take()
        exponent = self._deeper(self._argument)
        if exponent.denominator != 1:
            raise NotExact("a root")
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * size > MAX_BITS:
            raise NotExact("too large")
        return base ** int(exponent)

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
        """What LaTeX takes as one argument: a group, or a single digit of what follows."""
        kind = self._kind()
        if kind == "open" and self._tokens[self._at][1] == "{":
            return self._atom()
        if kind == "sign":
            return self._signed()
        if kind == "frac":
            return self._atom()
        text = self._take()
        if kind != "number":
            raise NotExact(text)
        if len(text) > 1:  # \frac12 and 2^10 of LaTeX
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
    if len(text) > MAX_LENGTH:
        raise NotExact("too long")
    return int(text or "0")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotExact("too large")
    return value
