"""Comparison of a program's output with the right one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_MAX_NUMBER = 400
"""Longest text that is compared as a number."""
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
_NOT_FINITE = {"nan": "nan", "inf": "inf", "infinity": "inf"}


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs agree line by line, without regard to space at the end of lines and of the text; or,
    where they differ, word by word as numbers.
    """
    lines, others = (
        [line.rstrip() for line in output.rstrip().splitlines()],
        [line.rstrip() for line in expected.rstrip().splitlines()],
    )
    if lines == others:
        return True
    if len(lines) != len(others):
        return False
    return all(a == b or _same_words(a.split(), b.split(), tolerance) for a, b in zip(lines, others, strict=True))


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values from JSON are equal; floats may differ by the tolerance, and NaN equals NaN."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, float) or isinstance(value, float):
        is_number = isinstance(value, int | float) and isinstance(expected, int | float)
        return is_number and _same_float(value, expected, tolerance)
    if isinstance(expected, list | tuple) and isinstance(value, list):
        return len(value) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k], tolerance) for k in expected)
    return type(value) is type(expected) and bool(value == expected)


def _same_float(value: float, expected: float, tolerance: float) -> bool:
    try:
        # a function that is to return NaN is right if it does
        both_nan = math.isnan(value) and math.isnan(expected)
        return both_nan or value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # a whole number beyond the floats
        return False


def _same_words(words: list[str], others: list[str], tolerance: float) -> bool:
    return len(words) == len(others) and all(
        word == other or _same_number(word, other, tolerance) for word, other in zip(words, others, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    number, known = _number(word), _number(expected)
    if number is None or known is None:
        return _not_finite(word) == _not_finite(expected) is not None
    if number == known:
        return True
    has_point = "." in expected or "e" in expected.lower()
    return has_point and math.isclose(float(number), float(known), rel_tol=tolerance, abs_tol=tolerance)


def _number(word: str) -> Decimal | None:
    if len(word) > _MAX_NUMBER or not _NUMBER.fullmatch(word):
        return None
    number = Decimal(word)
    return number if number.adjusted() < 300 else None


def _not_finite(word: str) -> str | None:
    """The usual name of NaN, whose sign says nothing, or of an infinity, as languages write them."""
    name = _NOT_FINITE.get(word.lower().lstrip("+-"))
    return "-inf" if name == "inf" and word.startswith("-") else name
