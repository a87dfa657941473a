"""Comparison of an answer with the known one."""

from __future__ import annotations

from fractions import Fraction

from rl_envs.math.agreement import all_of, matched
from rl_envs.math.config import AnswerFormat
from rl_envs.math.dapo import normalised
from rl_envs.math.exact import exact_value
from rl_envs.math.form import (
    Collection,
    Equation,
    Exact,
    Expression,
    Form,
    Interval,
    Name,
    Numeral,
    Ratio,
    Series,
    Union,
    is_variable,
    names_a_value,
    read,
    squeezed,
)
from rl_envs.math.number import Number, read_number
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
    if answer_format == "choice" or squeezed(found) == squeezed(known):
        return squeezed(found) == squeezed(known)
    if answer_format == "numeric":
        number, known_number = read_number(found), read_number(known)
        if known_number is None:
            raise ValueError(f"answer_format numeric needs a number as answer, got {known!r}")
        return number is not None and number.equals(known_number)
    return _same(read(found), read(known))


def _same(mine: Form, theirs: Form) -> bool | None:
    if isinstance(mine, Equation) or isinstance(theirs, Equation):
        return _same_equation(mine, theirs)
    if isinstance(mine, Ratio) or isinstance(theirs, Ratio):
        return _same_ratio(mine, theirs)
    if isinstance(mine, Number | Exact) and isinstance(theirs, Number | Exact):
        return _number(mine).equals(_number(theirs))
    for kind in (Numeral, Name, Series):
        if isinstance(mine, kind) or isinstance(theirs, kind):
            return _same_written(mine, theirs)
    if isinstance(mine, Interval | Union) or isinstance(theirs, Interval | Union):
        return _same_interval(_as_interval(mine), _as_interval(theirs))
    if isinstance(mine, Collection) and isinstance(theirs, Collection):
        return _same_collection(mine, theirs)
    if isinstance(mine, Collection) or isinstance(theirs, Collection):
        return False
    if any(isinstance(each, Number | Exact) and _is_long(each) for each in (mine, theirs)):
        return None
    return _are_equal(_text(mine), _text(theirs))


def _are_equal(mine: str, theirs: str) -> bool | None:
    # sympy takes a second to import, which numbers need not pay
    with outside_of_limit():
        from rl_envs.math.symbolic import are_equal
    return are_equal(mine, theirs)


def _same_equation(mine: Form, theirs: Form) -> bool | None:
    """Two equations with the same left side, or one and the value that it gives its variable."""
    if isinstance(mine, Equation) and isinstance(theirs, Equation):
        if squeezed(mine.left) == squeezed(theirs.left):
            return _same(mine.right, theirs.right)
        if is_variable(mine.left) and is_variable(theirs.left):
            return False
        if not all(_is_written(each.right) for each in (mine, theirs)):
            return None
        return _are_equal(*(f"{each.left}={_text(each.right)}" for each in (mine, theirs)))
    equation, value = (mine, theirs) if isinstance(mine, Equation) else (theirs, mine)
    assert isinstance(equation, Equation)
    same = _same(equation.right, value)
    is_named = names_a_value(equation.left) or exact_value(equation.left) is not None
    # of "x^2 = 4" it is unknown what is asked for
    return same if is_named or same is False else None


def _same_ratio(mine: Form, theirs: Form) -> bool | None:
    """Two ratios by their shares, or one and its value. As times, equal ratios such as 2:40 and 1:20 differ, so that
    they are undecided if both can be times."""
    if isinstance(mine, Ratio) and isinstance(theirs, Ratio):
        if mine.parts == theirs.parts:
            return True
        if len(mine.parts) != len(theirs.parts):
            return None if mine.is_clock and theirs.is_clock else False
        pairs = list(zip(mine.parts, theirs.parts, strict=True))
        is_same = all(a * d == b * c for a, b in pairs for c, d in pairs) and any(mine.parts) == any(theirs.parts)
        return None if is_same and mine.is_clock and theirs.is_clock else is_same
    ratio, value = (mine, theirs) if isinstance(mine, Ratio) else (theirs, mine)
    assert isinstance(ratio, Ratio)
    if len(ratio.parts) != 2 or not ratio.parts[1]:
        return None if isinstance(value, Expression) else False
    same = _same(Exact(Fraction(*ratio.parts)), value)
    return None if same and ratio.is_clock else same


def _same_written(mine: Form, theirs: Form) -> bool:
    """Names, numerals of a base and series are equal as they are written, and to nothing else."""
    return mine == theirs


def _as_interval(form: Form) -> Form:
    """A pair in brackets as the interval that it can be, where the other side is one."""
    if isinstance(form, Collection) and len(form.items) == 2 and form.brackets:
        return Interval(form.items[0], form.items[1], (form.brackets[0] == "(", form.brackets[1] == ")"))
    return form


def _same_interval(mine: Form, theirs: Form) -> bool | None:
    if isinstance(mine, Union) and isinstance(theirs, Union):
        return matched(list(map(_as_interval, mine.parts)), list(map(_as_interval, theirs.parts)), _same_interval)
    if not (isinstance(mine, Interval) and isinstance(theirs, Interval)):
        return None if isinstance(mine, Expression) or isinstance(theirs, Expression) else False
    if mine.is_open != theirs.is_open:
        return False
    ends = ((mine.low, theirs.low), (mine.high, theirs.high))
    return all_of(_same(one, other) if one and other else one is other for one, other in ends)


def _same_collection(mine: Collection, theirs: Collection) -> bool | None:
    if mine.is_ordered != theirs.is_ordered or mine.brackets != theirs.brackets:
        return False
    if not mine.is_ordered:
        return matched(list(mine.items), list(theirs.items), _same)
    if len(mine.items) != len(theirs.items):
        return False
    return all_of(_same(one, other) for one, other in zip(mine.items, theirs.items, strict=True))


def _is_written(form: Form) -> bool:
    return isinstance(form, Expression) or (isinstance(form, Number | Exact) and not _is_long(form))


def _is_long(form: Number | Exact) -> bool:
    """Return whether a value is too long to be written out."""
    return max(form.value.numerator.bit_length(), form.value.denominator.bit_length()) > MAX_BITS


def _number(form: Number | Exact) -> Number:
    return Number(form.value) if isinstance(form, Exact) else form


def _text(form: Form) -> str:
    """An expression as it is written, or the value of an exact one."""
    if isinstance(form, Expression):
        return form.text
    assert isinstance(form, Number | Exact), "other forms are compared part by part"
    return str(form.value)
