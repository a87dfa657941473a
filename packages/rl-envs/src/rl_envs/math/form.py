"""Answers in parsed form: quantities, numerals of other bases, names, collections, intervals, equations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rl_envs.math.exact import exact_value
from rl_envs.math.number import Number, read_number

MAX_LENGTH = 3000
"""Longest string, other than a number, that is read as a form."""
MAX_ITEMS = 40
"""Longest collection that is compared item by item."""

_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle)(?![A-Za-z])|\\[,;:! ]|\\q?quad|~|\$|\s+")
_NUMERAL = re.compile(r"\(?([0-9A-Za-z]+)\)?_(?:\{(?:\\text\{)?(\d{1,2}|[a-z]+)\}?\}|(\d{1,2}))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_WORDS = re.compile(r"(?=.*[A-Za-z]{3}|.*[A-Za-z]\.)[A-Za-z]+(?:[ .,'-]+[A-Za-z]+)*\.?")
_DOTS = re.compile(r"\\[lcd]?dots[cbmio]?(?![A-Za-z])|\.\.\.|…")
_REPEATING = re.compile(r"([-+−]?\d*)\.(\d*)(?:\\overline\s*\{(\d+)\}|\\overline\s*(\d)|\((\d+)\))")
_RATIO = re.compile(r"\d{1,15}(?::\d{1,15}){1,5}")
_CLOCK = re.compile(r"\d{1,3}(?::[0-5]\d){1,2}")
_SETS = (("\\{", "\\}"), ("{", "}"))
_RELATION = re.compile(r"(\\leqslant|\\geqslant|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])|\\lt|\\gt|<=|>=|≤|≥|<|>)")
_LESS = {"<": True, r"\lt": True, "<=": False, "≤": False, r"\le": False, r"\leq": False, r"\leqslant": False}
_MORE = {">": True, r"\gt": True, ">=": False, "≥": False, r"\ge": False, r"\geq": False, r"\geqslant": False}
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu)")
_TERM = r"\\?[A-Za-z]+(?: [A-Za-z]+)*(?:_\{?\w+\}?)?'?(?:\([^()]*\))?"
_NAMED = re.compile(rf"{_TERM}(?:[-+]{_TERM})*")
_ENDLESS = {
    r"\infty": 1, r"+\infty": 1, "∞": 1, "+∞": 1, "inf": 1, "infinity": 1, "oo": 1,
    r"-\infty": -1, "-∞": -1, "-inf": -1, "-infinity": -1, "-oo": -1,
}  # fmt: skip


@dataclass(frozen=True)
class Numeral:
    """Digits with the base that is written next to them."""

    digits: str
    base: int


@dataclass(frozen=True)
class Name:
    """Words that are not mathematics; case does not count."""

    words: str


@dataclass(frozen=True)
class Series:
    """A sequence with dots, compared as it is written."""

    text: str


@dataclass(frozen=True)
class Ratio:
    """Whole numbers between colons: a ratio, or a time of day or a duration if it can be one.

    Args:
        text: As it is written.
        is_clock: Whether minutes and seconds have two digits and are below 60.
    """

    text: str
    parts: tuple[int, ...]
    is_clock: bool


@dataclass(frozen=True)
class Expression:
    """Anything else, as it is written."""

    text: str


@dataclass(frozen=True)
class Exact:
    """A constant expression with its value."""

    value: Fraction


@dataclass(frozen=True)
class Interval:
    """The numbers between two bounds.

    Args:
        low, high: Bounds; None is infinite.
        is_open: Whether each bound is left out.
    """

    low: Form | None
    high: Form | None
    is_open: tuple[bool, bool]


@dataclass(frozen=True)
class Collection:
    """Several answers.

    Args:
        is_ordered: Whether their order counts, as in a tuple.
        brackets: Around them; empty for a set or a list.
    """

    items: tuple[Form, ...]
    is_ordered: bool
    brackets: str = ""


@dataclass(frozen=True)
class Union:
    """Intervals that are taken together."""

    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Equation:
    """`left = right`."""

    left: str
    right: Form


Form = Number | Numeral | Name | Series | Exact | Interval | Collection | Union | Equation | Ratio | Expression


def squeezed(text: str) -> str:
    """Return a string without white space and commands that only set it, except a space between two letters or digits,
    which counts."""

    def space(match: re.Match[str]) -> str:
        before = match.string[match.start() - 1 : match.start()]
        after = match.string[match.end() : match.end() + 1]
        return " " if before.isalnum() and after.isalnum() else ""

    return _SPACE.sub(space, text.strip())


def names_a_value(text: str) -> bool:
    """Return whether the left side of an equation names its right side, as `x`, `f(x)`, `a_1`, `m+n` and words do, and
    `x^2` does not."""
    plain = squeezed(_TEXT.sub(r"\1", text))
    return len(plain) <= MAX_LENGTH and _NAMED.fullmatch(plain) is not None


def is_variable(text: str) -> bool:
    """Return whether a string is the name of one variable."""
    return _VARIABLE.fullmatch(squeezed(text)) is not None


def read(text: str, depth: int = 0) -> Form:
    """Read an answer."""
    text = _TEXT.sub(r"\1", text).strip() if _is_words(_TEXT.sub(r"\1", text)) else text.strip()
    if (wrapped := _TEXT.fullmatch(text)) is not None:
        text = wrapped[1].strip()
    if numeral := _NUMERAL.fullmatch(squeezed(text)):
        base = numeral[2] or numeral[3]
        if (base := _BASES.get(base, base)).isdigit():
            return Numeral(numeral[1].lstrip("0").lower() or "0", int(base))
    if (number := read_number(text)) is not None:
        return number
    if len(text) > MAX_LENGTH:
        return Expression(text)
    if _RATIO.fullmatch(plain := squeezed(text)):
        return Ratio(plain, tuple(map(int, plain.split(":"))), _CLOCK.fullmatch(plain) is not None)
    if _DOTS.search(text):
        return Series(_DOTS.sub("...", squeezed(text)))
    if (repeating := _repeating(squeezed(text))) is not None:
        return Exact(repeating)
    if _is_words(text):
        return Name(" ".join(re.split(r"[ ,]+", text.casefold().strip(". "))))
    if (value := exact_value(text)) is not None:
        return Exact(value)
    if depth < 3:
        return _compound(text, depth) or Expression(text)
    return Expression(text)


def _is_words(text: str) -> bool:
    return len(text) < 200 and "_" not in text and _WORDS.fullmatch(text.strip()) is not None


def _compound(text: str, depth: int) -> Form | None:
    """A collection, an interval, or an equation."""
    plain = squeezed(text)
    if parts := _split(plain, (r"\cup", "∪")):
        return Union(tuple(read(part, depth + 1) for part in parts))
    if (interval := _bounded(plain, depth)) is not None:
        return interval
    for opening, closing in _SETS:
        if plain.startswith(opening) and plain.endswith(closing) and len(plain) > len(opening) + len(closing):
            inner = plain[len(opening) : -len(closing)]
            if "|" in inner or ":" in inner:
                return None
            items = _split(inner, (",",)) or [inner]
            return _collection(items, depth, is_ordered=False)
    if plain[:1] in "([" and plain[-1:] in ")]" and _closes(plain):
        items = _split(plain[1:-1], (",",))
        if items:
            return _pair_or_interval(plain[0] + plain[-1], items, depth)
        return None
    if items := _split(
        re.sub(r"\b(?:and|or)\b|\\(?:text|mbox|textrm)\s*\{\s*(?:and|or)\s*\}|\\quad", ",", text), (",", ";")
    ):
        cleaned = [item for item in map(str.strip, items) if item]
        return _collection(cleaned, depth, is_ordered=False)
    if r"\pm" in plain or "±" in plain:
        both = [re.sub(r"\\pm|±", sign, plain) for sign in "+-"]
        return _collection([each.removeprefix("+") for each in both], depth, is_ordered=False)
    left, equals, right = plain.partition("=")
    if equals and left and right and not set("=<>!") & set(right) and not left.endswith(("<", ">", "!", "\\")):
        return Equation(left, read(right, depth + 1))
    if (member := re.fullmatch(r"[A-Za-z]\\in(?![A-Za-z])(.+)", plain)) is not None:
        return read(member[1], depth + 1)
    return None


def _collection(items: Sequence[str], depth: int, *, is_ordered: bool, brackets: str = "") -> Form | None:
    if not items or len(items) > MAX_ITEMS:
        return None
    found = tuple(read(item, depth + 1) for item in items)
    # the set of one solution is that solution, but not within another set
    return found[0] if len(found) == 1 and depth == 0 else Collection(found, is_ordered, brackets)


def _pair_or_interval(brackets: str, items: Sequence[str], depth: int) -> Form | None:
    """A tuple; with one of its ends infinite or with brackets of two kinds, an interval."""
    if len(items) == 2:
        low, high = (_ENDLESS.get(item.lower()) for item in items)
        if low == -1 or high == 1 or brackets in ("[)", "(]"):
            ends = [None if end else read(item, depth + 1) for item, end in zip(items, (low, high), strict=True)]
            # nothing lies at infinity, whatever the bracket
            is_open = (brackets[0] == "(" or ends[0] is None, brackets[1] == ")" or ends[1] is None)
            return Interval(ends[0], ends[1], is_open)
    return _collection(items, depth, is_ordered=True, brackets=brackets)


def _bounded(text: str, depth: int) -> Form | None:
    r"""The interval of an inequality of one variable, such as `x \le 2` or `1 < x < 2`."""
    pieces = [piece.strip() for piece in _RELATION.split(text)]
    if len(pieces) not in (3, 5) or any(not piece for piece in pieces):
        return None
    if len(pieces) == 3:
        left, sign, right = pieces
        if _VARIABLE.fullmatch(left):
            bound, is_less = read(right, depth + 1), sign in _LESS
        elif _VARIABLE.fullmatch(right):
            bound, is_less = read(left, depth + 1), sign in _MORE
        else:
            return None
        is_strict = _LESS.get(sign, _MORE.get(sign, True))
        return Interval(None, bound, (True, is_strict)) if is_less else Interval(bound, None, (is_strict, True))
    low, first, middle, second, high = pieces
    if not _VARIABLE.fullmatch(middle):
        return None
    if first in _MORE and second in _MORE:
        low, high, first, second = high, low, second, first
        strict = (_MORE[first], _MORE[second])
    elif first in _LESS and second in _LESS:
        strict = (_LESS[first], _LESS[second])
    else:
        return None
    return Interval(read(low, depth + 1), read(high, depth + 1), strict)


def _repeating(text: str) -> Fraction | None:
    match = _REPEATING.fullmatch(text)
    if match is None or len(text) > 100:
        return None
    whole, fixed, cycle = match[1].replace("−", "-"), match[2], match[3] or match[4] or match[5]
    size = Fraction(int((whole.lstrip("+-") or "0") + fixed or "0"), 10 ** len(fixed))
    size += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return -size if whole.startswith("-") else size


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts of a string between separators outside of brackets; empty without a separator there."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        found = next((each for each in separators if text.startswith(each, position)), "") if depth == 0 else ""
        if found and not (found == "," and _is_grouping(text, position)):
            parts.append(text[start:position].strip())
            position = start = position + len(found)
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [*parts, text[start:].strip()] if parts else []


def _is_grouping(text: str, position: int) -> bool:
    """Return whether a comma groups the digits of a number in braces, as `1{,}000` does."""
    return text[position - 1 : position] == "{" and text[position + 1 : position + 2] == "}"


def _closes(text: str) -> bool:
    """Return whether the bracket that a string begins with is closed at its end."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index == len(text) - 1
    return False
