"""Numbers and units as people write them, read exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from rl_envs.math.exact import exact_value
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
        # Decimal reads digits without the limit that int has
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
    """Return whether a unit can begin at a place: one letter directly behind a number is a variable, and so is one
    letter behind an expression with variables."""
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
    # the marks of feet and inches are those of minutes and seconds of an angle too
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
