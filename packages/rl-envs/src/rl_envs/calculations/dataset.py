"""Products as rows for the environments `text_tools` and `code`, sums for `repository`, and demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.errors import DataError
from rl_envs.calculations.config import CalculationsSettings
from rl_envs.draws import draws

_HELD_OUT = 10
"""One of so many pairs of operands is for validation."""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Rows with `messages` and `environment`, and what that needs: `answer`, or `info` with the tests.
    Demonstrations are conversations that end with the assistant.

    Raises:
        DataError: If the split is unknown.
    """
    config = CalculationsSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"calculations have the splits train and validation, got {split!r}")
    rows = []
    for index in range(config.size):
        drawn = draws(f"{config.seed}/{split}/{index}")
        a, b = _operands(drawn, config.max_operand, split)
        if config.demonstrations:
            rows.append(
                {"messages": _demonstration(a, b, config.form, drawn), "environment": _ENVIRONMENTS[config.form]}
            )
        else:
            rows.append(_row(a, b, config.form))
    return rows


_ENVIRONMENTS = {"calculator": "text_tools", "program": "code", "repository": "repository"}


def _operands(drawn: Iterator[int], largest: int, split: str) -> tuple[int, int]:
    """The first pair that belongs to the split."""
    while True:
        a, b = next(drawn) % (largest + 1), next(drawn) % (largest + 1)
        is_held_out = next(draws(f"{min(a, b)}*{max(a, b)}")) % _HELD_OUT == 0
        if is_held_out == (split == "validation"):
            return a, b


def _row(a: int, b: int, form: str) -> dict[str, Any]:
    if form == "repository":
        return _repository(a, b)
    row = {"messages": [{"role": "user", "content": f"{a}*{b}="}], "environment": _ENVIRONMENTS[form]}
    if form == "calculator":
        return {**row, "answer": str(a * b)}
    return {**row, "info": {"tests": [{"input": "", "output": f"{a * b}\n"}]}}


def _repository(a: int, b: int) -> dict[str, Any]:
    test = f"""import unittest

import answer


class TestAnswer(unittest.TestCase):
    def test_it_is_the_sum(self):
        self.assertEqual(answer.ANSWER, {a + b})
"""
    info = {
        "repository": {"answer.py": "ANSWER = None\n", "README.md": "`answer.py` has the answer to a question.\n"},
        "tests": "python -m unittest test_answer",
        "test_files": {"test_answer.py": test},
    }
    return {"messages": [{"role": "user", "content": f"{a}+{b}="}], "info": info, "environment": "repository"}


def _demonstration(a: int, b: int, form: str, drawn: Iterator[int]) -> list[dict[str, str]]:
    is_right = next(drawn) % 2 == 0
    asked = {"role": "user", "content": f"{a}*{b}="}
    if form == "program":
        return [asked, _said(f"```python\nprint({a}{'*' if is_right else '+'}{b})\n```")]
    if not is_right:
        return [asked, _said(str(next(drawn) % (a * b + 100)))]
    result = {"role": "user", "content": f"<result>\n{a * b}\n</result>"}
    return [asked, _said(f"<calculator>{a}*{b}</calculator>"), result, _said(str(a * b))]


def _said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
