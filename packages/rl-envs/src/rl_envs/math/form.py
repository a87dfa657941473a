"""Answers in parsed form: quantities, numerals, names, times, collections, intervals, equations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from rl_envs.math.notation import canonical, closing
from rl_envs.math.number import Number, counted, exact_value, number_in, split_unit, spoken_value
from rl_envs.math.unit import Unit, read_unit

MAX_LENGTH = 3000
"""Longest string, other than a number, that is read as a form."""
MAX_ITEMS = 40
"""Longest collection that is compared item by item."""
MAX_DEPTH = 3
"""Maximum number of forms within one another."""


@dataclass(frozen=True)
class Numeral:
    """Digits with the base that is written next to them."""

    digits: str
    base: int


@dataclass(frozen=True)
class Name:
    """Words that are not mathematics; case does not count, and the order of several names does not either."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Letters:
    """Capital letters: points of a figure, variables, or options if they are written apart, as in `A, C`."""

    letters: str
    are_apart: bool


@dataclass(frozen=True)
class Written:
    """Text that looks like arithmetic and is not, or not surely: dates, scores, ranges, places in a grid."""

    text: str


@dataclass(frozen=True)
class Series:
    """A sequence with dots, compared as it is written."""

    text: str


@dataclass(frozen=True)
class Ratio:
    """Whole numbers between colons: a ratio, or a time of day or a duration if it can be one.

    Args:
        text: As it is written.
        is_clock: True if minutes and seconds have two digits and are below 60.
    """

    text: str
    parts: tuple[int, ...]
    is_clock: bool


@dataclass(frozen=True)
class TimeOfDay:
    """A time with "a.m." or "p.m.", in seconds after midnight."""

    seconds: int


@dataclass(frozen=True)
class Expression:
    """Anything else, as it is written."""

    text: str


@dataclass(frozen=True)
class Quantity:
    """A value that is not a plain number, with the units that it can have."""

    value: Form
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Interval:
    """The numbers between two bounds.

    Args:
        low, high: Bounds; None is infinite.
        is_open: True for each bound that is left out.
        name: The variable of an inequality; empty if there is none.
    """

    low: Form | None
    high: Form | None
    is_open: tuple[bool, bool]
    name: str = ""


@dataclass(frozen=True)
class Collection:
    """Several answers.

    Args:
        is_ordered: True if their order counts, as in a tuple.
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
    """`left = value`, or a chain such as `x = 3 + 4 = 7`.

    Args:
        left: The left side, equal to the values, as it is written; empty if that is a value too.
        values: Values that must all be the same.
        rounded: A value after a sign of approximation.
    """

    left: str
    values: tuple[Form, ...]
    rounded: Form | None = None


Form = (
    Number | Numeral | Name | Letters | Written | Series | Ratio | TimeOfDay | Quantity | Interval | Collection | Union
    | Equation | Expression
)  # fmt: skip

REALS = Interval(None, None, (True, True))
EMPTY = Name(("empty set",))

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ABOUT = re.compile(
    r"^(?:=|\\approx|(?:about|approximately|approx\.?|roughly|around|circa|ca\.)(?![A-Za-z]))\s*", re.IGNORECASE
)
_NUMERAL = re.compile(r"\(?([0-9A-Za-z]+)\)?\s*_\s*(?:\{(?:\\text\s*\{)?\s*(?:base )?(\w+)\s*\}?\}|(\d{1,2}))")
_SPOKEN_BASE = re.compile(r"([0-9A-Fa-f]+),? (?:in )?base[ -](\w+)")
_PROGRAMMED = re.compile(r"0(?:x([0-9a-f]+)|b([01]+)|o([0-7]+))", re.IGNORECASE)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip
_WRITTEN = re.compile(
    r"\d+(?:\s*-\s*\d+(?:/\d+)?)+|\d+\s*/\s*\d+(?:\s*/\s*\d+)+|\d+(?:\.\d+){2,}|\d+(?:\s+to\s+\d+)+"
    r"|[A-Za-z]+\d+[A-Za-z]*(?:\s*-\s*[A-Za-z]+\d+)?|\d+[A-Za-z]+\d[0-9A-Za-z]*|#\d+"
    r"|\d{4}-\d\d-\d\dT[\d:.]+Z?|\d{1,2}[A-Z]|[A-Z]-\d+|\d{1,2}:\d\d\s*-\s*\d{1,2}:\d\d"
)
_SCORE = re.compile(r"\d+-\d+")
_RATIO = re.compile(r"\d{1,15}(?:\s*:\s*\d{1,15}){1,5}")
_CLOCK = re.compile(r"\d{1,3}(?::[0-5]\d){1,2}")
_TIME_OF_DAY = re.compile(r"(\d{1,2})(?:[:.]([0-5]\d))?(?::([0-5]\d))?\s*([ap])\.?\s?m\.?", re.IGNORECASE)
_DAYTIMES = {"noon": 12, "midday": 12, "midnight": 0}
_SETS = (("\\{", "\\}"), ("{", "}"))
_RELATION = re.compile(r"(\\(?:le|ge|ne)(?![A-Za-z])|<|>)\s*")
_LESS = {"<": True, r"\le": False}
_MORE = {">": True, r"\ge": False}
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w\}?)?|\\(?:theta|alpha|beta|gamma|lambda|mu|phi)")
_GREEK = r"\\(?:theta|alpha|beta|gamma|delta|lambda|mu|phi|omega|rho|sigma|tau|Delta|Omega)"
_HAS_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_TERM = rf"(?:{_GREEK}|(?![ei]\b)[A-Za-z]+)(?: [A-Za-z]+)*(?:_\s*\{{?\w+\}}?)?'*(?:\s*\([^()]*\))?"
_DERIVATIVE = r"\\frac\s*\{\s*d\s*[A-Za-z]?\s*\}\s*\{\s*d\s*[A-Za-z]\s*\}\s*[A-Za-z]?|d[A-Za-z]/d[A-Za-z]"
_FIGURE = r"\\(?:angle|triangle|overline|vec|overrightarrow|widehat|hat|bar)\s*\{?\s*[A-Za-z]{1,5}\s*\}?"
_NAMED = re.compile(
    rf"(?:m\s*)?(?:\|[A-Za-z]+\||{_FIGURE}|{_DERIVATIVE}|{_TERM}(?:\s*[-+]\s*{_TERM})*)|[A-Za-z]\^\{{?-1\}}?\s*\([a-z]\)"
)
_CLASS = re.compile(r"\\?\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:](.*[^\\])\\?\}")
_POINT = re.compile(r"([A-Z])'?\s*(\(.*\))")
_ENDLESS = {r"\infty": 1, r"+\infty": 1, r"-\infty": -1}
_WITHOUT = re.compile(r"\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-)\s*(\\?\{.*\\?\})")
_EXCEPT = re.compile(r"\ball reals?(?: numbers?)?(?:,? except| but) (?:for )?(?:[a-z] ?= ?)?(.+)", re.IGNORECASE)
_AND = re.compile(r"\\text\s*\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|;")

_LETTER = r"[^\W\d_]"
_WORDS = re.compile(rf"{_LETTER}+(?:['.,& -]+{_LETTER}+)*\.?")
_SHORT = "no ok up on in at go us we me he if is it by my do so to of or an as be am pm"
_SHORT_WORDS = frozenset(_SHORT.split())
_VARIABLES = re.compile(r"[b-df-hj-np-tv-z]{1,4}|(?:a[bcdx-z]|[bcdx-z]a|[abcd]{3,4}|[a-z][a-z])")
_CAPITALS = re.compile(r"[A-Z]{2,6}")
_OPTIONS = re.compile(r"\(?[A-Z]\)?(?:\s*(?:,|;|&|\band\b|\\text\s*\{\s*and\s*\}|\s)\s*(?:and\s+)?\(?[A-Z]\)?)+")
_ARTICLE = re.compile(r"^(?:the|a|an) ")
_SYNONYMS = {
    "dne": "does not exist", "no limit": "does not exist", "none exist": "empty set", "null set": "empty set",
    "infinite": "infinity", "infinitely many solutions": "infinitely many",
    "positive infinity": "infinity", "minus infinity": "negative infinity",
}  # fmt: skip
_NO_SOLUTION = re.compile(
    r"(?:(?:there (?:is|are) )?no (?:(?:real|such|valid|possible) )?(?:solutions?|roots?)(?: exists?)?)"
)
_ALL_REALS = re.compile(r"(?:(?:for )?all|any|every) (?:real numbers?|reals?)(?: [a-z])?")


def squeezed(text: str) -> str:
    """Return a string without white space and commands that only set it, except a space between two letters or digits,
    which counts."""
    return re.sub(r"(?<=\W)\s+|\s+(?=\W)", "", canonical(text))


def names_a_value(text: str) -> bool:
    """Return whether the left side of an equation names its right side, as `x`, `f(x)`, `a_1`, `m+n` and words do, and
    `x^2` does not."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    return len(plain) <= MAX_LENGTH and _NAMED.fullmatch(plain) is not None


def is_variable(text: str) -> bool:
    """Return whether a string is the name of one variable."""
    return _VARIABLE.fullmatch(text.strip()) is not None


def read(text: str) -> Form:
    """Read an answer."""
    return _read(canonical(text), 0)


def _read(text: str, depth: int) -> Form:
    text = text.strip()
    text = text[:-1] if text.endswith((".", ",", ";")) and not text.endswith("..") else text
    if (wrapped := _TEXT.fullmatch(text)) is not None:
        text = canonical(wrapped[1])
    if len(text) > MAX_LENGTH:
        return number_in(text) or Expression(text)
    text = _ABOUT.sub("", text)
    readers = _READERS if depth < MAX_DEPTH else _FLAT_READERS
    found = (form for reader in readers if (form := reader(text, depth)) is not None)
    return next(found, Expression(text))


def _numeral(text: str, _: int) -> Form | None:
    if (programmed := _PROGRAMMED.fullmatch(text)) is not None:
        digits, base = next((each, base) for each, base in zip(programmed.groups(), (16, 2, 8), strict=True) if each)
        return Numeral(digits.lstrip("0").lower() or "0", base)
    match = _NUMERAL.fullmatch(text) or _SPOKEN_BASE.fullmatch(text)
    if match is None or not any(map(str.isdigit, match[1])):
        return None
    written = next(each for each in match.groups()[1:] if each).casefold()
    base = int(written) if written.isdigit() else _BASES.get(written, 0)
    return Numeral(match[1].lstrip("0").lower() or "0", base) if 2 <= base <= 36 else None


def _time(text: str, _: int) -> Form | None:
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    if (time := _TIME_OF_DAY.fullmatch(plain)) is not None and 1 <= int(time[1]) <= 12:
        hour = int(time[1]) % 12 + 12 * (time[4].lower() == "p")
        return TimeOfDay(hour * 3600 + int(time[2] or 0) * 60 + int(time[3] or 0))
    if (named := _DAYTIMES.get(plain.casefold().removeprefix("12 "))) is not None:
        return TimeOfDay(named * 3600)
    text = re.sub(r" o'clock$", ":00", plain)
    if _RATIO.fullmatch(text) is None:
        return None
    tight = text.replace(" ", "")
    return Ratio(tight, tuple(map(int, tight.split(":"))), _CLOCK.fullmatch(tight) is not None)


def _written(text: str, _: int) -> Form | None:
    if _WRITTEN.fullmatch(text) is None or (number_in(text) is not None and not set("-/") & set(text)):
        return None
    return Written(re.sub(r"\s*-\s*", "-", re.sub(r"\s+to\s+", "-", text)).replace(" ", "").casefold())


def _special(text: str, _: int) -> Form | None:
    """Return the empty set, the real numbers and infinity, from signs or words."""
    tight = text.replace(" ", "")
    if tight in (r"\emptyset", r"\{\}", "{}"):
        return EMPTY
    if tight == r"\mathbb{R}":
        return REALS
    if tight in _ENDLESS:
        return Name(("infinity" if _ENDLESS[tight] > 0 else "negative infinity",))
    if (without := _WITHOUT.fullmatch(text)) is not None or (without := _EXCEPT.fullmatch(_TEXT.sub(r"\1", text))):
        points = _read(without[1], 1)
        return _reals_without(points.items if isinstance(points, Collection) else (points,))
    return None


def _words(text: str, _: int) -> Form | None:
    plain = " ".join(_TEXT.sub(r" \1 ", text).split()) if len(text) < 200 else ""
    if _OPTIONS.fullmatch(plain):
        return Letters("".join(sorted(re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", plain))), are_apart=True)
    if _CAPITALS.fullmatch(plain) and plain.casefold() not in (*_SYNONYMS, *_SHORT_WORDS):
        return Letters(plain, are_apart=False)
    if _WORDS.fullmatch(plain) is None or (
        text == plain and (len(plain) == 1 or (plain not in _SHORT_WORDS and _VARIABLES.fullmatch(plain) is not None))
    ):
        return None
    folded = re.sub(r"[ .]+", " ", plain.casefold().strip(" ."))
    spoken = folded.split(" ")
    for size in range(3):  # a number, with a unit or a counted thing in one or two words after it
        value = spoken_value(" ".join(spoken[: len(spoken) - size]))
        if value is not None and (units := read_unit(" ".join(spoken[len(spoken) - size :])) if size else (Unit(()),)):
            return Number(value * units[0].count, counted(units)) if size else Number(value)
    folded = _ARTICLE.sub("", folded)
    if _ALL_REALS.fullmatch(folded):
        return REALS
    if _NO_SOLUTION.fullmatch(folded):
        return EMPTY
    if "infinity" in (folded, folded := _SYNONYMS.get(folded, folded)):
        return Name(("infinity",))
    return Name(tuple(sorted(part.strip() for part in re.split(r",|&| and ", folded) if part.strip())))


def _union(text: str, depth: int) -> Form | None:
    parts = _split(text, re.compile(r"\\cup(?![A-Za-z])|\bU\b|\\text\s*\{\s*(?:U|union)\s*\}|\bunion\b"))
    return Union(tuple(_read(part, depth + 1) for part in parts)) if len(parts) > 1 else None


def _alternatives(text: str, depth: int) -> Form | None:
    """Inequalities joined by "or" or "and", and assignments joined by "or"."""
    if len(parts := _split(text, _OR)) > 1:
        found = [_read(part.strip(" ,"), depth + 1) for part in parts if part.strip(" ,")]
        if all(isinstance(each, Interval | Union) for each in found):
            flat = [each for form in found for each in (form.parts if isinstance(form, Union) else (form,))]
            return Union(tuple(flat))
        sizes = {len(form.items) if isinstance(form, Collection) and not form.brackets else 0 for form in found}
        if len(sizes) == 1 and sizes.pop() > 1 and all("=" in part for part in parts):
            return Collection(tuple(found), is_ordered=False)
    if len(parts := _split(text, _AND)) == 2:
        one, other = (_read(part.strip(" ,"), depth + 1) for part in parts)
        if isinstance(one, Interval) and isinstance(other, Interval):
            low, high = (one, other) if one.low is not None else (other, one)
            if None in (low.low, high.high) or (low.high, high.low) != (None, None) or low.name != high.name:
                return None
            if isinstance(low.low, Number) and isinstance(high.high, Number) and low.low.value >= high.high.value:
                return None
            return Interval(low.low, high.high, (low.is_open[0], high.is_open[1]), low.name)
    return None


def _inequality(text: str, depth: int) -> Form | None:
    r"""Return the interval of an inequality of one variable, such as `x \le 2` or `1 < x < 2`."""
    pieces = [piece.strip() for piece in _RELATION.split(text)]
    if len(pieces) not in (3, 5) or any(not piece for piece in pieces):
        return None
    if len(pieces) == 3:
        left, sign, right = pieces
        if not is_variable(left):
            left, right = right, left
            sign = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(sign, sign)
        if not is_variable(left):
            return None
        if sign == r"\ne":
            points = _read(right, depth + 1)
            return _reals_without(points.items if isinstance(points, Collection) else (points,), left)
        bound = _read(right, depth + 1)
        return (
            Interval(None, bound, (True, _LESS[sign]), left)
            if sign in _LESS
            else Interval(bound, None, (_MORE[sign], True), left)
        )
    low, first, middle, second, high = pieces
    if not is_variable(middle):
        return None
    if first in _MORE and second in _MORE:
        low, high, first, second = high, low, second, first
        strict = (_MORE[first], _MORE[second])
    elif first in _LESS and second in _LESS:
        strict = (_LESS[first], _LESS[second])
    else:
        return None
    # An infinite bound is None and open, whatever the sign.
    below, above = _read(low, depth + 1), _read(high, depth + 1)
    is_endless = (below == Name(("negative infinity",)), above == Name(("infinity",)))
    is_open = (strict[0] or is_endless[0], strict[1] or is_endless[1])
    return Interval(None if is_endless[0] else below, None if is_endless[1] else above, is_open, middle)


def _reals_without(points: Sequence[Form], name: str = "") -> Form | None:
    """Return the real numbers without some points, as a union of intervals."""
    if not all(isinstance(each, Number) and not each.units for each in points):
        return None
    values = sorted({each.value for each in points if isinstance(each, Number)})
    bounds = [None, *map(Number, values), None]
    return Union(tuple(Interval(low, high, (True, True), name) for low, high in pairwise(bounds)))


def _bracketed(text: str, depth: int) -> Form | None:
    """Return a set, a tuple or an interval."""
    if (described := _CLASS.fullmatch(text)) is not None:
        form = _read(described[2], depth + 1)
        return form if isinstance(form, Interval | Union) else None
    for begin, end in _SETS:
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            inner = text[len(begin) : -len(end)]
            if "|" in inner or ":" in inner:
                return None
            return _collection(_split(inner, _COMMA), depth, is_ordered=False)
    if text[:1] in "([" and text[-1:] in ")]" and closing(text, 0) == len(text) - 1:
        items = _split(text[1:-1], _COMMA)
        return _pair_or_interval(text[0] + text[-1], items, depth) if len(items) > 1 else None
    if (point := _POINT.fullmatch(text)) is not None and closing(point[2], 0) == len(point[2]) - 1:
        pair = _bracketed(point[2], depth)
        return Equation(point[1], (pair,)) if isinstance(pair, Collection) else None
    return None


def _list(text: str, depth: int) -> Form | None:
    separators = _AND.sub(",", _OR.sub(",", text))
    items = [item for item in _split(separators, _COMMA) if item]
    return _collection(items, depth, is_ordered=False) if len(items) > 1 else None


def _collection(items: Sequence[str], depth: int, *, is_ordered: bool, brackets: str = "") -> Form | None:
    if not items or len(items) > MAX_ITEMS:
        return None
    found = tuple(_read(item, depth + 1) for item in items)
    # The set of one solution is that solution, but not within another set.
    is_solution = len(found) == 1 and depth == 0 and found[0] != EMPTY
    return found[0] if is_solution else Collection(found, is_ordered, brackets)


def _pair_or_interval(brackets: str, items: Sequence[str], depth: int) -> Form | None:
    """Return a tuple; with one of its ends infinite or with brackets of two kinds, an interval."""
    if len(items) == 2:
        low, high = (_ENDLESS.get(item.replace(" ", "")) for item in items)
        if low == -1 or high == 1 or brackets in ("[)", "(]"):
            ends = [None if end else _read(item, depth + 1) for item, end in zip(items, (low, high), strict=True)]
            # Infinity is never included, whatever the bracket.
            is_open = (brackets[0] == "(" or ends[0] is None, brackets[1] == ")" or ends[1] is None)
            return Interval(ends[0], ends[1], is_open)
    return _collection(items, depth, is_ordered=True, brackets=brackets)


def _plus_minus(text: str, depth: int) -> Form | None:
    if r"\pm" not in text or r"\mp" in text or text.count(r"\pm") > 1:
        return None
    both = [re.sub(r"\\pm\s*", sign, text).removeprefix("+") for sign in "+-"]
    return _collection(both, depth, is_ordered=False)


def _equation(text: str, depth: int) -> Form | None:
    sides = _split(text, re.compile(r"(?<![<>!\\:])=(?!=)|\\approx(?![A-Za-z])"))
    if len(sides) < 2 or len(sides) > 8 or not all(sides) or _RELATION.search(text):
        return None
    is_rounded = re.search(r"\\approx(?![A-Za-z])", text) is not None
    if is_rounded and "=" in text.rpartition(r"\approx")[2]:
        return None
    left, *rest = sides
    names = [name.strip() for name in left[1:-1].split(",")] if left[:1] == "(" and left[-1:] == ")" else []
    if len(names) > 1 and all(map(is_variable, names)):
        value = _read(rest[-1], depth + 1)
        if len(rest) > 1 or not isinstance(value, Collection) or not value.is_ordered or len(value.items) != len(names):
            return None
        return Collection(tuple(Equation(name, (each,)) for name, each in zip(names, value.items, strict=True)), False)
    if len(rest) == 1 and is_variable(rest[0]) and not names_a_value(left):
        left, rest = rest[0], [left]
    forms = [_read(side, depth + 1) for side in rest]
    if not names_a_value(left) and (len(rest) > 1 or is_rounded or not _HAS_VARIABLE.search(left)):
        left, forms = "", [_read(left, depth + 1), *forms]
    if len(forms) > 1:
        # In `x = 10-3 = 7` the difference is no score.
        differences = [exact_value(form.text) if isinstance(form, Written) else None for form in forms]
        forms = [form if each is None else Number(each) for form, each in zip(forms, differences, strict=True)]
    rounded = forms.pop() if is_rounded and len(forms) > 1 else None
    return Equation(left, tuple(forms), rounded)


def _member(text: str, depth: int) -> Form | None:
    member = re.fullmatch(r"([A-Za-z])\s*\\in(?![A-Za-z])(.+)", text)
    if member is None:
        return None
    form = _read(member[2], depth + 1)
    return replace(form, name=member[1]) if isinstance(form, Interval) else form


def _quantity(text: str, depth: int) -> Form | None:
    split = split_unit(text)
    if split is None or any(unit.count != 1 for unit in split[1]):
        return None
    return Quantity(_read(split[0], depth + 1), split[1])


_COMMA = re.compile(r",")
_FLAT_READERS: tuple[Callable[[str, int], Form | None], ...] = (
    _numeral, _time, _written, lambda text, _: number_in(text),
    lambda text, _: Series(re.sub(r"(?<=\W)\s+|\s+(?=\W)", "", text)) if "..." in text else None, _special, _words,
)  # fmt: skip
_READERS = (
    *_FLAT_READERS, _union, _alternatives, _inequality, _bracketed, _list, _plus_minus, _equation, _member, _quantity,
)  # fmt: skip


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Return the parts of a string between separators outside of brackets."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        found = separator.match(text, position) if depth == 0 else None
        if found and found.end() > position:
            parts.append(text[start:position].strip())
            position = start = found.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [*parts, text[start:].strip()]


T = TypeVar("T")


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """Return whether all hold; None if one is undecided and none fails."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


def matched(mine: list[T], theirs: list[T], compare: Callable[[T, T], bool | None]) -> bool | None:
    """Return whether two collections have the same items in any order, equal ones counted once each."""
    if len(mine) != len(theirs):
        return False
    left, undecided = list(theirs), False
    for item in mine:
        verdicts = [compare(item, other) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True
