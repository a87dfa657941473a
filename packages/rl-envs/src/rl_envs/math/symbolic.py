"""Symbolic comparison by math-verify; imports sympy."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# it warns that its own timeouts are off; they need signals, and the process pool has a deadline
logging.getLogger("math_verify").setLevel(logging.ERROR)

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


def are_equal(found: str, known: str) -> bool:
    """Whether two LaTeX or plain expressions, sets, intervals, equations or matrices are equivalent."""
    return bool(verify(list(_parsed_known(known)), _parsed(found), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed_known(known: str) -> tuple[Any, ...]:
    # all rollouts of a group share their known answer
    return tuple(_parsed(known))


def _parsed(text: str) -> list[Any]:
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text.translate(_SIGNS))
    text = _NAME.sub(lambda match: _NAMES[match[1]], text.replace("**", "^"))
    return list(parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None))
