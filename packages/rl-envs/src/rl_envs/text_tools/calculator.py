"""A calculator: arithmetic, and nothing else of Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARACTERS = 2000
"""Maximum number of characters of an expression."""
MAX_DIGITS = 3000
"""Maximum number of digits of a rounded number. More would take long and change nothing."""
MAX_BITS = 10_000
"""Largest size of an integer on the way."""


def _rounded(number: Any, digits: int | None = None) -> Any:
    return round(number) if digits is None else round(number, max(-MAX_DIGITS, min(MAX_DIGITS, digits)))


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_NAMES: Mapping[str, float] = {"pi": math.pi, "e": math.e}
_OF_MATH = "sqrt exp log log2 log10 sin cos tan asin acos atan floor ceil gcd lcm"
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in _OF_MATH.split()},
    "abs": abs,
    "round": _rounded,
    "min": min,
    "max": max,
}


def calculate(expression: str) -> str:
    """Return the value of an expression, or the problem with it, beginning with "error:".

    Integers stay exact up to `MAX_BITS`; a float that is a whole number is written as one.
    """
    if len(expression) > MAX_CHARACTERS:
        return f"error: an expression may have {MAX_CHARACTERS} characters"
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        number = _value(ast.parse(text, mode="eval").body)
        if isinstance(number, float) and number.is_integer() and abs(number) < 2**53:
            number = int(number)
        return repr(number)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error.msg if isinstance(error, SyntaxError) else error}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            are_integers = isinstance(a, int) and isinstance(b, int)
            if isinstance(op, ast.Pow) and are_integers and abs(b) * int(a).bit_length() > MAX_BITS:
                raise ValueError("the number is too large")
            return _bounded(_BINARY[type(op)](a, b))
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_value(operand)))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(
        f"{ast.unparse(node)[:60]} is not arithmetic; there are + - * / // % ** and {', '.join(_FUNCTIONS)}"
    )


def _bounded(number: Any) -> int | float:
    if not isinstance(number, int | float):
        raise ValueError("the result is not a real number")
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return number
