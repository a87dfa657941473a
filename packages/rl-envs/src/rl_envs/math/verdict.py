"""Comparison of an answer with the known one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import product
from typing import Any

from rl_envs.math.extraction import is_number, normalised
from rl_envs.math.form import (
    Collection,
    Equation,
    Expression,
    Form,
    Interval,
    Letters,
    Name,
    Numeral,
    Quantity,
    Ratio,
    Series,
    TimeOfDay,
    Union,
    Written,
    all_of,
    is_variable,
    matched,
    names_a_value,
    read,
    squeezed,
)
from rl_envs.math.number import Number, exact_value, read_number, split_unit
from rl_envs.math.plugin import AnswerFormat
from rl_envs.time_limit import CPU_S, outside_of_limit, within

MAX_BITS = 4096
"""Largest value that is compared with an expression."""


def is_correct(found: str, known: str, answer_format: AnswerFormat) -> bool:
    """Return whether an answer equals the known one, as far as that can be decided in time."""
    return judge_in_time(found, known, answer_format) is True


def judge_in_time(found: str, known: str, answer_format: AnswerFormat) -> bool | None:
    """Return the verdict of `judge`; None if it takes too much processor time or too deep a recursion."""
    try:
        return within(CPU_S, lambda: judge(found, known, answer_format))
    except RecursionError:
        return None


def judge(found: str, known: str, answer_format: AnswerFormat) -> bool | None:
    """Return whether an answer equals the known one; None if that cannot be decided.

    Both are read into a form. Exact values are compared exactly and by nothing else, collections and intervals part by
    part, names as words; only expressions that are none of these are compared symbolically.
    """
    if answer_format == "dapo":
        return normalised(found) == normalised(known)
    mine, theirs = squeezed(found), squeezed(known)
    if answer_format == "choice" or mine == theirs:
        return mine == theirs
    if answer_format == "numeric":
        known_number = read_number(known)
        if known_number is None:
            raise ValueError(f"answer_format numeric needs a number as answer, got {known!r}")
        return _same(read(found), known_number) if is_number(found) else None
    if (decimal := _decimal_comma(known, found)) is not None and _same(read(decimal), read(found)):
        return None
    return _same(read(_decimal_comma(found, known) or found), read(known))


def _decimal_comma(text: str, other: str) -> str | None:
    """Return `3,14` as the decimal `3.14`, if the other answer is one with a point; it can also be a list."""
    is_decimal = re.fullmatch(r"[-+]?\d+,(?!\d{3}$)\d+", text.strip()) and re.fullmatch(r"[-+]?\d+\.\d+", other.strip())
    return text.replace(",", ".") if is_decimal else None


def _same(mine: Form, theirs: Form) -> bool | None:
    for kinds, compare in _COMPARISONS:
        if isinstance(mine, kinds):
            return compare(mine, theirs)
        if isinstance(theirs, kinds):
            return compare(theirs, mine)
    for one, other in ((mine, theirs), (theirs, mine)):
        if isinstance(one, Number) and (one.units or isinstance(other, Number)):
            return _same_quantity(one, other)
    return _are_equal(mine, theirs)


def _are_equal(mine: Form, theirs: Form) -> bool | None:
    """Compare two expressions, or an expression and a number, symbolically."""
    one, other = _text(mine), _text(theirs)
    if one is None or other is None:
        return None
    # Sympy takes a second to import, which numbers need not pay.
    with outside_of_limit():
        from rl_envs.math.symbolic import are_equal
    return are_equal(one, other)


def _text(form: Form) -> str | None:
    """Return an expression as it is written, or the value of a number; None for forms that are neither."""
    if isinstance(form, Expression):
        return form.text
    if not isinstance(form, Number) or form.units:
        return None
    size = max(form.value.numerator.bit_length(), form.value.denominator.bit_length())
    return str(form.value) if size <= MAX_BITS else None


def _same_equation(mine: Equation, theirs: Form) -> bool | None:
    """Two equations with the same left side, or one and the value that it gives its variable."""
    if not _is_consistent(mine) or (isinstance(theirs, Equation) and not _is_consistent(theirs)):
        return None
    if not isinstance(theirs, Equation):
        if isinstance(theirs, Number) and isinstance(mine.values[-1], Collection):
            return None  # "P(8,3)" is a point or a number of permutations
        # The quantity that "x^2 = 4" answers is unknown.
        return _same_value(mine, theirs) if not mine.left or names_a_value(mine.left) else None
    if squeezed(mine.left) == squeezed(theirs.left):
        return _same_value(mine, theirs.values[-1])
    if not mine.left or not theirs.left:
        left = mine.left or theirs.left
        return _same_value(mine, theirs.values[-1]) if names_a_value(left) else None
    if all(is_variable(each.left) and isinstance(each.values[-1], Number) for each in (mine, theirs)):
        return None if _same(mine.values[-1], theirs.values[-1]) is not False else False
    sides = [(each.left, _text(each.values[-1])) for each in (mine, theirs)]
    if any(right is None for _, right in sides):
        return None
    return _are_equal(*(Expression(f"{left}={right}") for left, right in sides))


def _is_consistent(equation: Equation) -> bool:
    """Return whether all values of a chain of equations are certainly the same."""
    return all(_same(value, equation.values[-1]) is True for value in equation.values[:-1])


def _same_value(equation: Equation, other: Form) -> bool | None:
    same = _same(equation.values[-1], other)
    if same is True or equation.rounded is None or _same(equation.rounded, other) is not True:
        return same
    return True if _is_rounding(equation.values[-1], equation.rounded) else None


def _is_rounding(value: Form, rounded: Form) -> bool:
    """Return whether a decimal is a value rounded to its digits."""
    text = _text(value)
    if text is None or not isinstance(rounded, Number) or rounded.units:
        return False
    step = rounded.value.denominator
    digits = next((digits for digits in range(20) if 10**digits % step == 0), None)
    if digits is None:
        return False
    with outside_of_limit():
        from rl_envs.math.symbolic import is_near
    return is_near(text, rounded.value, Fraction(1, 2 * 10**digits))


def _same_quantity(mine: Number | Quantity, theirs: Form) -> bool | None:
    """Compare values with units. If only one of them has a unit, that is the unit meant."""
    # The last letter of an expression is read as a unit, as in `5m`.
    lettered = isinstance(theirs, Expression) and re.fullmatch(r"(.*[\d})])([A-Za-z](?:\^\{?\d\}?)?)", theirs.text)
    if mine.units and lettered and (split := split_unit(f"{lettered[1]} {lettered[2]}")) is not None:
        theirs = Quantity(read(split[0]), split[1])
    if not isinstance(theirs, Number | Quantity | Expression):
        return _same(mine.value, theirs) if isinstance(mine, Quantity) else False if isinstance(theirs, Name) else None
    value, other = (
        each.value if isinstance(each, Quantity) else Number(each.value) if isinstance(each, Number) else each
        for each in (mine, theirs)
    )
    units, other_units = mine.units, theirs.units if isinstance(theirs, Number | Quantity) else ()
    if not units or not other_units:
        # 50% is 50 and 1/2, 30° is 30 and π/6.
        sizes = {"1", *(_SIZES[unit.powers] for unit in (*units, *other_units) if unit.powers in _SIZES)}
        found = {_same_size(value, size if units else "1", other, "1" if units else size) for size in sizes}
    else:
        found = set()
        for unit, other_unit in product(units, other_units):
            if unit.powers == other_unit.powers:
                found.add(_same_size(value, str(unit.size), other, str(other_unit.size)))
            elif unit.powers in _ANGLES and other_unit.powers in _ANGLES:
                found.add(_same_size(value, _ANGLES[unit.powers], other, _ANGLES[other_unit.powers]))
            else:
                found.add(None if unit.is_counted() or other_unit.is_counted() else False)
    return True if True in found else None if None in found else False


_ANGLES = {(("°", 1),): "pi/180", (("rad", 1),): "1"}
_SIZES = {(("%", 1),): "1/100", (("°", 1),): "pi/180"}
"""Factors that may replace the unit of a number."""


def _same_size(value: Form, size: str, other: Form, other_size: str) -> bool | None:
    is_rational = "pi" not in size + other_size
    if isinstance(value, Number) and isinstance(other, Number) and is_rational:
        return value.value * Fraction(size) == other.value * Fraction(other_size)
    scaled = []
    for form, factor in ((value, size), (other, other_size)):
        if isinstance(form, Number) and "pi" not in factor:
            form = Number(form.value * Fraction(factor)) if factor != "1" else form
        elif factor != "1" and (text := _text(form)) is not None:
            form = Expression(rf"({text})\cdot({factor})".replace("pi", r"\pi "))
        scaled.append(form)
    return _same(*scaled)


def _same_ratio(mine: Ratio, theirs: Form) -> bool | None:
    """Two ratios by their shares, or one and its value. As times, equal ratios such as 2:40 and 1:20 differ, so that
    they are undecided if both can be times."""
    if isinstance(theirs, Ratio):
        if mine.parts == theirs.parts:
            return True
        if len(mine.parts) != len(theirs.parts):
            return None if mine.is_clock and theirs.is_clock else False
        pairs = list(zip(mine.parts, theirs.parts, strict=True))
        is_same = all(a * d == b * c for a, b in pairs for c, d in pairs) and any(mine.parts) == any(theirs.parts)
        return None if is_same and mine.is_clock and theirs.is_clock else is_same
    if len(mine.parts) != 2 or not mine.parts[1]:
        return False if isinstance(theirs, Number) and not theirs.units else None
    same = _same(Number(Fraction(*mine.parts)), theirs)
    return None if mine.is_clock and (same or (isinstance(theirs, Number) and theirs.units)) else same


def _same_time(mine: TimeOfDay, theirs: Form) -> bool | None:
    """Two times, or one and a clock of 24 hours; without a.m. or p.m., hours up to twelve can be either."""
    if isinstance(theirs, TimeOfDay):
        return mine == theirs
    if not isinstance(theirs, Ratio) or not theirs.is_clock:
        return None
    hours, minutes, seconds = (*theirs.parts, 0)[:3]
    total = hours * 3600 + minutes * 60 + seconds
    if total == mine.seconds:
        return True
    return None if (total - mine.seconds) % 43200 == 0 and hours <= 12 else False


def _same_written(mine: Form, theirs: Form) -> bool | None:
    """Compare names, numerals of a base and series, which are equal only as they are written."""
    if isinstance(mine, Name) and isinstance(theirs, Expression):
        return True if theirs.text.casefold() == " ".join(mine.words) else None
    if isinstance(theirs, Expression | Collection | Interval | Union) or (
        type(mine) is not type(theirs) and isinstance(mine, Series)
    ):
        return None
    if isinstance(mine, Numeral) and isinstance(theirs, Number):
        try:
            return None if int(mine.digits, mine.base) == theirs.value else False
        except ValueError:
            return False
    return mine == theirs


def _same_letters(mine: Letters, theirs: Form) -> bool | None:
    if theirs == Name((mine.letters.casefold(),)):
        return True
    if not isinstance(theirs, Letters):
        return None
    if mine.are_apart or theirs.are_apart:
        return sorted(mine.letters) == sorted(theirs.letters)
    # A product of variables has no order, the corners of a figure may have one.
    return mine == theirs or (None if sorted(mine.letters) == sorted(theirs.letters) else False)


def _as_interval(form: Form) -> Form:
    """Return a pair in brackets as the interval that it can be, because the other side is one."""
    if isinstance(form, Collection) and len(form.items) == 2 and form.brackets:
        return Interval(form.items[0], form.items[1], (form.brackets[0] == "(", form.brackets[1] == ")"))
    return form


def _same_union(mine: Union, theirs: Form) -> bool | None:
    parts = theirs.parts if isinstance(theirs, Union) else (theirs,)
    merged, others = _merged(mine.parts), _merged(parts)
    if merged is not None and others is not None:
        return merged == others
    if not isinstance(theirs, Union):
        return None
    return matched([_as_interval(each) for each in mine.parts], [_as_interval(each) for each in parts], _same)


_Bound = tuple[Fraction, bool]


def _merged(parts: Iterable[Form]) -> list[tuple[_Bound | None, _Bound | None]] | None:
    """Return the disjoint intervals of a union; None if a bound is not a number."""
    intervals: list[tuple[_Bound | None, _Bound | None]] = []
    for part in map(_as_interval, parts):
        singles = part.items if isinstance(part, Collection) and not part.brackets else (part,)
        for single in singles:
            form = Interval(single, single, (False, False)) if isinstance(single, Number) else _as_interval(single)
            if not isinstance(form, Interval):
                return None
            ends: list[_Bound | None] = []
            for end, is_open in zip((form.low, form.high), form.is_open, strict=True):
                if end is not None and (not isinstance(end, Number) or end.units):
                    return None
                ends.append(None if end is None else (end.value, is_open))
            intervals.append((ends[0], ends[1]))
    intervals.sort(key=lambda each: (each[0] is not None, each[0] or (Fraction(0), False)))
    merged: list[tuple[_Bound | None, _Bound | None]] = []
    for low, high in intervals:
        before = merged[-1][1] if merged else None
        is_apart = before and low and (low[0] > before[0] or (low[0] == before[0] and low[1] and before[1]))
        if merged and not is_apart:
            is_longer = before is not None and (high is None or (high[0], not high[1]) > (before[0], not before[1]))
            merged[-1] = (merged[-1][0], high if is_longer else before)
        else:
            merged.append((low, high))
    return merged


def _same_interval(mine: Interval, theirs: Form) -> bool | None:
    theirs = _as_interval(theirs)
    if not isinstance(theirs, Interval):
        return None if isinstance(theirs, Expression | Collection | Equation) else False
    if mine.is_open != theirs.is_open:
        return False
    ends = ((mine.low, theirs.low), (mine.high, theirs.high))
    same = all_of(_same(one, other) if one and other else one is other for one, other in ends)
    has_other_name = bool(mine.name and theirs.name) and mine.name != theirs.name
    return None if same and has_other_name else same


def _same_collection(mine: Collection, theirs: Form) -> bool | None:
    if not isinstance(theirs, Collection):
        return (
            False
            if isinstance(theirs, Number) and any(_same(mine.items[0], other) is False for other in mine.items[1:])
            else None
        )
    named = [_by_name(each) for each in (mine, theirs)]
    if (named[0] is None) != (named[1] is None):
        return _same_named(mine, theirs) if named[0] is not None else _same_named(theirs, mine)
    if named[0] is not None and named[1] is not None and mine.is_ordered != theirs.is_ordered:
        return matched(list(mine.items), list(theirs.items), _same)
    if mine.is_ordered != theirs.is_ordered or mine.brackets != theirs.brackets:
        is_bare = not (mine.brackets and theirs.brackets)
        return None if is_bare and matched(list(mine.items), list(theirs.items), _same) else False
    if not mine.is_ordered:
        return matched(list(mine.items), list(theirs.items), _same)
    return _same_items(mine.items, theirs.items)


def _same_items(mine: tuple[Form, ...], theirs: tuple[Form, ...]) -> bool | None:
    return len(mine) == len(theirs) and all_of(_same(one, other) for one, other in zip(mine, theirs, strict=True))


def _by_name(collection: Collection) -> tuple[Form, ...] | None:
    """Return the values of several variables in alphabetical order; None if the items are anything else."""
    named = {item.left: item.values[-1] for item in collection.items if isinstance(item, Equation) and item.left}
    if len(named) != len(collection.items) or len(named) < 2 or not all(map(is_variable, named)):
        return None
    return tuple(named[name] for name in sorted(named))


def _same_named(named: Collection, plain: Collection) -> bool | None:
    """Compare values of variables with a pair or list, whose order is the alphabet's; another order is undecided."""
    values = _by_name(named)
    assert values is not None
    if plain.brackets[:1] not in ("", "(", "[") or (
        not plain.is_ordered and any(isinstance(each, Equation | Collection) for each in plain.items)
    ):
        return None
    same = _same_items(values, plain.items)
    names = [item.left for item in named.items if isinstance(item, Equation)]
    # This may be a pair in the order of the names as they are written, or a list in any order.
    is_clear = names == sorted(names) and plain.is_ordered
    return None if same is False and not is_clear and matched(list(values), list(plain.items), _same) else same


# The first kind that one of two forms has decides how they are compared.
_COMPARISONS: tuple[tuple[Any, Callable[[Any, Form], bool | None]], ...] = (
    (Equation, _same_equation),
    (TimeOfDay, _same_time),
    (Ratio, _same_ratio),
    (
        Written,
        lambda mine, theirs: (
            None
            if not isinstance(theirs, Written)
            else mine == theirs or (None if exact_value(mine.text) == exact_value(theirs.text) else False)
        ),
    ),
    (Letters, _same_letters),
    (Quantity, _same_quantity),
    (Numeral | Name | Series, _same_written),
    (Union, _same_union),
    (Interval, _same_interval),
    (Collection, _same_collection),
)
