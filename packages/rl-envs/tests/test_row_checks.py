"""Rows that no completion can answer, by environment. A case is a line."""

from typing import Any

import pytest

from rl_core.plugins import ENVIRONMENTS, plugin, resolve

NAN = float("nan")


@pytest.mark.parametrize(
    ("environment", "settings", "info", "says"),
    [
        pytest.param("math", {}, {"answer": NAN}, "finite", id="NaN"),
        pytest.param("math", {}, {"answer": ""}, "empty", id="an empty answer [huggingface/open-r1#503]"),
        pytest.param("math", {}, {"answer": None}, "string or a number", id="null [gensyn-ai/rl-swarm#163]"),
        pytest.param("math", {}, {"answer": True}, "string or a number", id="a truth value"),
        pytest.param("math", {}, {"answer": []}, "empty list", id="no answers"),
        pytest.param("math", {}, {}, "needs an answer", id="no field"),
        pytest.param(
            "math",
            {"answer_format": "numeric"},
            {"answer": "x"},
            "number",
            id="a word for a number [huggingface/open-r1#86]",
        ),
        pytest.param("math", {"answer_format": "choice"}, {"answer": "12"}, "letter", id="a number for a letter"),
        pytest.param("multiple_choice", {"num_choices": 4}, {"answer": "E"}, "E", id="a letter beyond the options"),
        pytest.param("match", {}, {"answer": " "}, "empty", id="nothing to match [openai/evals#1780]"),
        pytest.param("match", {}, {"answer": NAN}, "finite", id="NaN to match"),
        pytest.param("match", {"mode": "regex"}, {"pattern": "("}, "not a regular expression", id="a broken pattern"),
        pytest.param("match", {"mode": "regex"}, {"pattern": None}, "null", id="no pattern"),
        pytest.param("match", {"mode": "json"}, {"answer": "{"}, "not JSON", id="broken JSON"),
        pytest.param("match", {"mode": "json_schema"}, {}, "needs the field", id="no schema"),
        pytest.param("code", {}, {"tests": []}, "at least one test", id="no tests"),
    ],
)
def test_a_row_that_no_completion_can_answer_is_refused(environment: str, settings: Any, info: Any, says: str) -> None:
    found = plugin(ENVIRONMENTS, environment)
    with pytest.raises(ValueError, match=says):
        resolve(found.row_check)(info, found.config(**settings))


@pytest.mark.parametrize(
    ("environment", "settings", "info"),
    [
        ("math", {}, {"answer": ["1", 2, 0.5, r"\\frac{1}{2}"]}),
        ("multiple_choice", {"num_choices": 4}, {"answer": "D"}),
        ("match", {"mode": "json"}, {"answer": None}),
        ("match", {"mode": "regex"}, {"pattern": "a+"}),
        ("code", {}, {"test_code": "assert True"}),
    ],
)
def test_a_row_that_can_be_answered_is_not(environment: str, settings: Any, info: Any) -> None:
    found = plugin(ENVIRONMENTS, environment)
    resolve(found.row_check)(info, found.config(**settings))
