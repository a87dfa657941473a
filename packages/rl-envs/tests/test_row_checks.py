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
        pytest.param("math", {}, {"answer": "One plus one is 2."}, "solution in words", id="a solution in words"),
        pytest.param("math", {}, {"answer": "One plus\none is 2, so it is even"}, "solution in words", id="two lines"),
        pytest.param("math", {"answer_format": "choice"}, {"answer": "12"}, "letter", id="a number for a letter"),
        pytest.param("multiple_choice", {"num_choices": 4}, {"answer": "E"}, "E", id="a letter beyond the options"),
        pytest.param("match", {}, {"answer": " "}, "empty", id="nothing to match [openai/evals#1780]"),
        pytest.param("match", {}, {"answer": NAN}, "finite", id="NaN to match"),
        pytest.param("match", {"mode": "regex"}, {"pattern": "("}, "not a regular expression", id="a broken pattern"),
        pytest.param("match", {"mode": "regex"}, {"pattern": None}, "null", id="no pattern"),
        pytest.param("match", {"mode": "json"}, {"answer": "{"}, "not JSON", id="broken JSON"),
        pytest.param("match", {"mode": "json_schema"}, {}, "needs the field", id="no schema"),
        pytest.param("match", {}, {"answer": "a</think>"}, "mark of thoughts", id="a mark of thoughts to match"),
        pytest.param("match", {"answer_tag": "a"}, {"answer": "x</a>y"}, "the tag a", id="the tag in the answer"),
        pytest.param(
            "match", {"mode": "json_schema"}, {"schema": {"type": "string", "enum": [1]}}, "enum", id="no option fits"
        ),
        pytest.param(
            "match",
            {"mode": "json_schema"},
            {
                "schema": {
                    "type": "object",
                    "required": ["a"],
                    "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}},
                }
            },
            "property 'a': its minItems 2 is above its maxItems 1",
            id="bounds that cross",
        ),
        pytest.param(
            "match",
            {"mode": "json_schema"},
            {"schema": {"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False}},
            "requires 'b'",
            id="a required property that is not allowed",
        ),
        pytest.param("match", {"mode": "json_schema"}, {"schema": False}, "is false", id="a schema of nothing"),
        pytest.param("code", {}, {"tests": []}, "at least one test", id="no tests"),
        pytest.param("code", {}, {"test_code": "assert f( == 1"}, "not Python", id="a test that does not compile"),
        pytest.param(
            "code", {}, {"tests": [{"arguments": [], "result": b"x"}], "function": "f"}, "plain data", id="bytes"
        ),
        pytest.param(
            "code",
            {},
            {"tests": [{"arguments": [], "result": 1}], "function": "f()"},
            "name of a function",
            id="a call for a function",
        ),
        pytest.param(
            "code",
            {"sandbox": {"output_kib": 1}},
            {"tests": [{"input": "", "output": "x" * 1025}]},
            "sandbox.output_kib",
            id="an output beyond the limit",
        ),
        pytest.param(
            "instructions",
            {},
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 1, "relation": "less than"}],
            },
            "no response can follow",
            id="less than one word",
        ),
    ],
)
def test_a_row_that_no_completion_can_answer_is_refused(environment: str, settings: Any, info: Any, says: str) -> None:
    found = plugin(ENVIRONMENTS, environment)
    with pytest.raises(ValueError, match=says):
        resolve(found.row_check)(info, found.config(**settings))


@pytest.mark.parametrize(
    ("environment", "settings", "info"),
    [
        ("math", {}, {"answer": "One plus one is 2.\n#### 2"}),
        ("math", {}, {"answer": "12 square meters per second"}),
        ("math", {}, {"answer": r"2 \text{ if } n \text{ is even}"}),
        ("math", {"answer_format": "numeric"}, {"answer": "The answer is 2"}),
        ("math", {}, {"answer": ["1", 2, 0.5, r"\\frac{1}{2}"]}),
        ("multiple_choice", {"num_choices": 4}, {"answer": "D"}),
        ("match", {"mode": "json"}, {"answer": None}),
        ("match", {"mode": "regex"}, {"pattern": "a+"}),
        ("match", {"answer_tag": "a"}, {"answer": ["x</a>y", "z"]}),
        ("match", {"mode": "json"}, {"answer": {"a": "</think>"}}),
        ("match", {"mode": "json_schema"}, {"schema": {"type": "integer", "minimum": 1, "maximum": 1, "enum": [1]}}),
        ("code", {}, {"function": "f", "tests": [{"arguments": [], "result": (1, 2)}]}),
        ("code", {}, {"test_code": "assert True"}),
    ],
)
def test_a_row_that_can_be_answered_is_not(environment: str, settings: Any, info: Any) -> None:
    found = plugin(ENVIRONMENTS, environment)
    resolve(found.row_check)(info, found.config(**settings))
