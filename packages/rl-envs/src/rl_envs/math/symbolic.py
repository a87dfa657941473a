"""Comparison of expressions by sympy, which reads them by the grammar of LaTeX that math-verify uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from rl_envs.math.form import all_of, matched

MAX_LENGTH = 1000
"""Longest string that is read as an expression."""
MAX_DEPTH = 20
"""Maximum number of nested brackets."""
DIGITS = 60
"""Precision, in digits, of the difference of two expressions that refutes their equality."""

# Units are read elsewhere, and a dropped one would make different quantities equal.
_NORMALISED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERTED = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_ALLOWED = (
    "frac sqrt binom cdot times pi infty sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp "
    "alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi psi omega Delta Omega Gamma Phi "
    "begin end sum prod max min gcd lcm lfloor rfloor lceil rceil bmod mod pmod le ge ne"
)
_COMMANDS = frozenset(_ALLOWED.split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_NOT_ARITHMETIC = re.compile(
    r"['%]|\\text|[^\x00-\x7f°]|\^\s*\{?\s*T\s*\}?(?![A-Za-z])|[fgh]\s*\^\s*\{?\s*-\s*1|(?<![A-Za-z])[A-Za-z]\d|(?<![_^\d])\d+\s+\d|\)\s*\d|:|\d\s+(?![a-dp-z]{2})[A-Za-z]{2}"
)
"""Marks of derivatives, inverse functions, transposed matrices and text, which the grammar would read as arithmetic."""
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{1,4}|[abcd]{1,4}|[A-Z]{1,2}|[A-Za-z]{1,2}")
"""Letters side by side that can be variables; longer runs are words."""
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\)|(?<![A-Za-z\\])[A-Za-z]|\\(?:theta|alpha|beta))\s*°")
_TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_ERRORS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Errors of sympy and of the parser for expressions that they did not foresee."""
_TOWER = re.compile(
    r"\^\s*(?:\d+|\w)\s*\^|\^\s*\{[^{}]*(?:\d|\))\s*\^\s*[\d({\\]|(?:\)\s*\^\s*\{?\s*\d+\s*\}?\s*){4}"
    r"|\d{4,}\s*\)?!|\^\s*\{?\s*\d+\s*\}?\s*\)\s*!|\^\s*\{?\s*-?\d{4,}|\^\s*\{[^{}]*\d!"
)
"""Powers of powers, large powers and factorials, which sympy would try to write out."""

_LOG = re.compile(r"\\log(?![A-Za-z]|\s*_)")
_UNREAD = (sympy.logic.boolalg.BooleanAtom, sympy.zoo, sympy.nan, sympy.Derivative, sympy.Integral)
_CONSTANTS = {"e": sympy.E, "i": sympy.I}


def are_equal(found: str, known: str) -> bool | None:
    """Return whether two expressions are the same; None if that can be neither proven nor refuted.

    A difference that is not zero to `DIGITS` digits refutes; only an exact simplification to zero proves.
    """
    if not all(_is_modest(text) and _is_arithmetic(text) for text in (found, known)):
        return None
    # A sum of angles, such as 90° - x, is also a number of degrees.
    plain = [text if _TRIGONOMETRY.search(text) else text.replace("°", "") for text in (found, known)]
    if plain != [found, known]:
        return are_equal(*plain) or None
    try:
        mine, theirs = _parsed(found), _parsed_known(known)
        same = None if mine is None or theirs is None else _same(mine, theirs)
        if same is False and _LOG.search(found + known):
            # Without a base it is the logarithm to base 10 or e.
            natural = (_parsed(_LOG.sub(r"\\ln", text)) for text in (found, known))
            return None if _same(*natural) is not False else False
        return same
    except _ERRORS:
        return None


def is_near(text: str, value: Fraction, distance: Fraction) -> bool:
    """Return whether an expression without variables is at most a distance from a value."""
    if not (_is_modest(text) and _is_arithmetic(text)):
        return False
    try:
        parsed = _parsed(text)
        return parsed is not None and bool(abs(parsed - sympy.Rational(value)) <= sympy.Rational(distance))
    except _ERRORS:
        return False


def _is_arithmetic(text: str) -> bool:
    """Return whether a string has nothing but the signs and functions of arithmetic, and variables."""
    if _NOT_ARITHMETIC.search(text) or not {found[1] for found in _COMMAND.finditer(text)} <= _COMMANDS:
        return False
    plain = _COMMAND.sub(" ", re.sub(r"\\(?:begin|end)\{[a-z]*\}", " ", text))
    return all(_PRODUCT.fullmatch(run[0]) for run in re.finditer(r"[A-Za-z]+", plain))


def _is_modest(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    is_flat = deepest <= MAX_DEPTH and text.count("|") <= MAX_DEPTH
    return len(text) <= MAX_LENGTH and is_flat and _TOWER.search(text) is None


def _parsed(text: str) -> Any:
    """Return the sympy object of an expression, with decimals as exact fractions; None if it cannot be read as a whole,
    or divides by zero."""
    text = _DEGREES.sub(r"(\\frac{\\pi}{180}\\cdot(\1))", text)
    if "°" in text:
        return None
    try:
        expression = latex2sympy(text, is_real=True, normalization_config=_NORMALISED, conversion_config=_CONVERTED)
    except Exception:  # noqa: BLE001 - the grammar raises nothing more specific for unknown input
        return None
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase) or expression.has(*_UNREAD):
        return None
    letters = {each: _CONSTANTS[each.name] for each in expression.free_symbols if each.name in _CONSTANTS}
    expression = expression.xreplace(letters)
    floats = expression.atoms(sympy.Float)
    return expression.xreplace({each: sympy.Rational(str(each)) for each in floats}) if floats else expression


_parsed_known = lru_cache(maxsize=1024)(_parsed)  # All rollouts of a group share their known answer.


def _same(mine: Any, theirs: Any) -> bool | None:
    for kind, compare in _KINDS:
        if isinstance(mine, kind) or isinstance(theirs, kind):
            return compare(mine, theirs) if isinstance(mine, kind) and isinstance(theirs, kind) else False
    if isinstance(mine, sympy.Expr) and isinstance(theirs, sympy.Expr):
        if mine == theirs:
            return True
        mine, theirs = _real_roots(mine), _real_roots(theirs)
        if _differ_somewhere(mine, theirs):
            return False
        # Both may be defined for positive values only.
        positive = _positive(mine) & _positive(theirs)
        positives = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in positive}
        difference = (mine - theirs).xreplace(positives)
        return True if any(prove(difference) == 0 for prove in _PROOFS) else None
    return True if mine == theirs else None


_PROOFS: tuple[Callable[[Any], Any], ...] = (
    sympy.expand,
    lambda difference: sympy.expand(sympy.expand_log(difference.doit())),
    sympy.simplify,
    lambda difference: sympy.cancel(sympy.together(sympy.expand(difference.rewrite(sympy.exp), power_exp=True))),
)
"""Forms of a difference that are zero only if it is, the quicker ones first."""


def _positive(expression: Any) -> set[Any]:
    """Return the variables that must be positive, or all negative, for logarithms and square roots to be defined."""
    arguments = {each.args[0] for each in expression.atoms(sympy.log)}
    arguments |= {each.base for each in expression.atoms(sympy.Pow) if each.exp.is_Rational and each.exp.q == 2}
    found: set[Any] = set()
    for argument in arguments:
        coefficient, powers = argument.as_coeff_mul()[0], argument.as_powers_dict()
        if coefficient > 0 and all(base.is_Symbol or base.is_number for base in powers):
            found |= {base for base, power in powers.items() if base.is_Symbol and power.is_odd}
    return found


def _real_roots(expression: Any) -> Any:
    """Return an expression with real roots of odd order of negative numbers, as in the cube root of -8."""

    def is_odd_root(one: Any) -> bool:
        return bool(one.is_Pow and one.exp.is_Rational and one.exp.q % 2 and one.exp.q > 1 and one.base.is_negative)

    return expression.replace(is_odd_root, lambda each: (-1) ** each.exp.p * (-each.base) ** each.exp)


def _differ_somewhere(mine: Any, theirs: Any) -> bool:
    """Return whether two expressions are certainly different, for some values of their variables if they have any."""
    symbols = sorted(mine.free_symbols | theirs.free_symbols, key=str)
    positive = _positive(mine) | _positive(theirs)
    is_complex = mine.has(sympy.I) or theirs.has(sympy.I)
    for start in (3, 7, -4, -9) if symbols else (0,):
        signed = {each: abs(start) if each in positive else start for each in symbols}
        # Variables that usually count are whole numbers.
        values = {
            each: sympy.Integer(abs(signed[each]) + index)
            if each.name[0] in "nkmjNKM"
            else sympy.Rational(signed[each] + 2 * index, 5)
            for index, each in enumerate(symbols)
        }
        one, other = (sympy.N(side.subs(values), DIGITS, maxn=1000) for side in (mine, theirs))
        if not all(value.is_number and value.is_finite and (is_complex or value.is_real) for value in (one, other)):
            continue
        # Digits that two large values have in common are lost in their difference.
        difference = sympy.N((mine - theirs).subs(values), DIGITS, maxn=1000)
        if difference.is_number and difference.is_finite and abs(difference) > sympy.Float(10) ** (3 - DIGITS):
            return True
    return False


def _same_items(mine: Any, theirs: Any) -> bool | None:
    if len(mine) != len(theirs):
        return False
    return all_of(_same(one, other) for one, other in zip(mine, theirs, strict=True))


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
    (sympy.FiniteSet, lambda mine, theirs: matched(list(mine), list(theirs), _same)),
    (sympy.Tuple, _same_items),
    (sympy.MatrixBase, lambda mine, theirs: mine.shape == theirs.shape and _same_items(list(mine), list(theirs))),
    (sympy.core.relational.Relational, _same_relation),
)
