"""Comparison of expressions by sympy, which reads them by the grammar of LaTeX that math-verify uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from rl_envs.math.agreement import all_of, matched

MAX_LENGTH = 1000
"""Longest string that is read as an expression."""
MAX_DEPTH = 20
"""Maximum number of nested brackets."""
DIGITS = 60
"""Digits to which a difference of two expressions is computed to refute that they are equal."""

# units are read elsewhere, and a dropped one would make different quantities equal
_NORMALISED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERTED = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "∪": r"\cup ",
    }
)
_ROOT = re.compile(r"(?<!\\)\bsqrt\s*\(([^()]*)\)|√\s*\(([^()]*)\)|√\s*(\d+)")
_NAMES = {"pi": r"\pi ", "infinity": r"\infty ", "inf": r"\infty "}
_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_NAMES)})(?![A-Za-z])")
_SYMPY_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of sympy and of the parser for expressions that they did not foresee."""
_TOWER = re.compile(
    r"\^\s*\{?[^{}^]*\^|\d{4,}\s*\)?!|\^\s*\{?\s*\d+\s*\}?\s*\)\s*!|\^\s*\{?\s*-?\d{4,}|\^\s*\{[^{}]*\d!"
)
"""Powers of powers, large powers and factorials, which sympy would try to write out."""

_DEGREES = (r"\circ", "°")
"""Signs that the grammar drops, so that an angle in degrees would be read in radians."""
_CONSTANTS = {"e": sympy.E, "i": sympy.I}


def are_equal(found: str, known: str) -> bool | None:
    """Return whether two expressions are the same; None if that can be neither proven nor refuted.

    A difference that is not zero to `DIGITS` digits refutes; only an exact simplification to zero proves.
    """
    if not (_is_modest(found) and _is_modest(known)) or any(sign in found + known for sign in _DEGREES):
        return None
    try:
        mine, theirs = _parsed(found), _parsed_known(known)
        return None if mine is None or theirs is None else _same(mine, theirs)
    except _SYMPY_ERRORS:
        return None


def _is_modest(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(text) <= MAX_LENGTH and deepest <= MAX_DEPTH and _TOWER.search(text) is None


@lru_cache(maxsize=1024)
def _parsed_known(known: str) -> Any:
    # all rollouts of a group share their known answer
    return _parsed(known)


def _parsed(text: str) -> Any:
    """The sympy object of an expression, with decimals as exact fractions; None if it cannot be read as a whole, or
    divides by zero."""
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text.translate(_SIGNS))
    text = _NAME.sub(lambda match: _NAMES[match[1]], text.replace("**", "^"))
    try:
        expression = latex2sympy(text, is_real=True, normalization_config=_NORMALISED, conversion_config=_CONVERTED)
    except Exception:  # noqa: BLE001 - the grammar raises nothing more specific for what it cannot read
        return None
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase) or expression.has(sympy.zoo, sympy.nan):
        return None
    return _exact(expression)


def _exact(expression: Any) -> Any:
    """The expression with decimals as fractions, and with the constants that mathematics writes as letters."""
    letters = {each: _CONSTANTS[each.name] for each in expression.free_symbols if each.name in _CONSTANTS}
    expression = expression.xreplace(letters)
    floats = expression.atoms(sympy.Float)
    return expression.xreplace({each: sympy.Rational(str(each)) for each in floats}) if floats else expression


def _same(mine: Any, theirs: Any) -> bool | None:
    for kind, compare in _KINDS:
        if isinstance(mine, kind) or isinstance(theirs, kind):
            return compare(mine, theirs) if isinstance(mine, kind) and isinstance(theirs, kind) else False
    if isinstance(mine, sympy.Expr) and isinstance(theirs, sympy.Expr):
        return _same_value(mine, theirs)
    return True if mine == theirs else None


def _same_value(mine: Any, theirs: Any) -> bool | None:
    if mine == theirs:
        return True
    difference = mine - theirs
    if _differs_somewhere(difference):
        return False
    return True if sympy.expand(difference) == 0 or sympy.simplify(difference) == 0 else None


def _differs_somewhere(difference: Any) -> bool:
    """Return whether a difference is certainly not zero, for some values of its variables if it has any."""
    symbols = sorted(difference.free_symbols, key=str)
    for start in (3, 7):
        values = {symbol: sympy.Rational(start + 2 * index, 5) for index, symbol in enumerate(symbols)}
        value = sympy.N(difference.subs(values), DIGITS, maxn=1000)
        if value.is_number and value.is_finite and abs(value) > sympy.Float(10) ** (3 - DIGITS):
            return True
        if not symbols:
            return False
    return False


def _same_items(mine: Any, theirs: Any) -> bool | None:
    if len(mine) != len(theirs):
        return False
    return all_of(_same(one, other) for one, other in zip(mine, theirs, strict=True))


def _same_set(mine: Any, theirs: Any) -> bool | None:
    return matched(list(mine), list(theirs), _same)


def _same_matrix(mine: Any, theirs: Any) -> bool | None:
    return mine.shape == theirs.shape and _same_items(list(mine), list(theirs))


def _same_relation(mine: Any, theirs: Any) -> bool | None:
    if type(mine) is not type(theirs):
        mine, theirs = mine.canonical, theirs.canonical
    if type(mine) is not type(theirs):
        return None
    left, right = mine.lhs - mine.rhs, theirs.lhs - theirs.rhs
    ratio = sympy.simplify(left / right) if right != 0 else sympy.nan
    if not ratio.is_number or ratio == 0 or not ratio.is_finite:
        return None
    return True if isinstance(mine, sympy.Eq) or ratio > 0 else None


_KINDS: tuple[tuple[Any, Callable[[Any, Any], bool | None]], ...] = (
    (sympy.FiniteSet, _same_set),
    (sympy.Tuple, _same_items),
    (sympy.MatrixBase, _same_matrix),
    (sympy.core.relational.Relational, _same_relation),
)
