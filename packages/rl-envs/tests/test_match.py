"""The environment `match`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_core.rollouts.environment import Conversation, UnusableAnswer
from rl_core.rollouts.json_schema import check_schema, satisfies
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.match.environment import MatchEnvironment, check_row
from rl_envs.match.plugin import MatchConfig


def _turn(completion: str, info: dict[str, Any], id: str = "0") -> Conversation:
    return Conversation(id=id, messages=(), info=info, completion=completion)


def _reward(environment: Any, completion: str, **info: Any) -> float:
    [result] = environment.step([_turn(completion, info)], [None])
    reward: float = result.rewards()["reward"]
    return reward


class TestMatchConformance(EnvironmentSuite):
    def environment(self) -> MatchEnvironment:
        return MatchEnvironment(MatchConfig())

    def conversations(self) -> list[Conversation]:
        return [_turn(text, {"answer": "yes"}, text) for text in ("yes", "no", " yes ")]


@pytest.mark.parametrize(
    ("settings", "completion", "info", "reward"),
    [
        ({}, " a  b\n", {"answer": "a b"}, 1.0),
        ({"ignore_space": False}, " a b", {"answer": "a b"}, 0.0),
        ({}, "A b", {"answer": "a b"}, 0.0),
        ({"ignore_case": True}, "A b", {"answer": "a b"}, 1.0),
        ({}, "two", {"answer": ["one", "two"]}, 1.0),
        pytest.param({}, "7", {"answer": 7}, 1.0, id="a number [Red-Hat-AI-Innovation-Team/training_hub#83]"),
        ({}, "3", {"answer": 3.0}, 1.0),
        ({}, "3.0", {"answer": 3.0}, 1.0),
        ({}, "3", {"answer": [2.0, 3.0]}, 1.0),
        ({}, "4", {"answer": 3.0}, 0.0),
        ({}, "3", {"answer": 3.5}, 0.0),
        ({}, "100000000000000000000", {"answer": 1e20}, 1.0),
        ({"mode": "contains"}, "it is 3.", {"answer": 3.0}, 1.0),
        ({"mode": "contains"}, "it is Paris, I think", {"answer": "Paris"}, 1.0),
        ({"mode": "contains"}, "it is Rome", {"answer": "Paris"}, 0.0),
        pytest.param({"mode": "contains"}, "", {"answer": "Paris"}, 0.0, id="an empty response [openai/evals#1780]"),
        pytest.param(
            {"mode": "contains"}, "P", {"answer": "Paris"}, 0.0, id="a part of the answer [confident-ai/deepeval#3218]"
        ),
        ({"mode": "regex"}, "ab12\n", {"pattern": r"[a-z]+\d+"}, 1.0),
        ({"mode": "regex"}, "ab12 and more", {"pattern": r"[a-z]+\d+"}, 0.0),
        ({"answer_tag": "answer"}, "x <answer>a</answer> y <answer>b</answer>", {"answer": "b"}, 1.0),
        ({"answer_tag": "answer"}, "b", {"answer": "b"}, 0.0),
        ({"mode": "json"}, '{"b": 1, "a": [2]}', {"answer": '{"a": [2], "b": 1}'}, 1.0),
        ({"mode": "json"}, 'Here:\n```json\n{"a": 1}\n```', {"answer": {"a": 1}}, 1.0),
        ({"mode": "json"}, '{"a": true}', {"answer": {"a": 1}}, 0.0),
        pytest.param(
            {"mode": "json"},
            '```json\n{"a": "```sh\\nls\\n```"}\n```',
            {"answer": {"a": "```sh\nls\n```"}},
            1.0,
            id="a block in a text [FoundationAgents/MetaGPT#1984]",
        ),
        pytest.param(
            {"mode": "json"},
            '{"a": "```json\\n{}\\n```"}',
            {"answer": {"a": "```json\n{}\n```"}},
            1.0,
            id="a block in bare JSON [Mercor-Intelligence/archipelago#132]",
        ),
        ({"mode": "json"}, "null", {"answer": None}, 1.0),
        ({"mode": "json"}, "not json", {"answer": None}, 0.0),
        ({"mode": "json"}, "[" * 100_000, {"answer": []}, 0.0),
        ({"mode": "json_schema"}, '{"a": 1}', {"schema": '{"required": ["a"]}'}, 1.0),
        ({"mode": "json_schema"}, "{}", {"schema": {"required": ["a"]}}, 0.0),
    ],
)
def test_a_response_matches_by_its_mode(
    settings: dict[str, Any], completion: str, info: dict[str, Any], reward: float
) -> None:
    assert _reward(MatchEnvironment(MatchConfig(**settings)), completion, **info) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        pytest.param("{}", 1.0, id="bare"),
        pytest.param("\ufeff{}", 1.0, id="byte-order mark"),
        pytest.param("```json\r\n{}\r\n```", 1.0, id="line ends of Windows"),
        pytest.param("```json\n{}\n```\nSee [docs] for more.", 1.0, id="brackets behind it [langgenius/dify#42451]"),
        pytest.param("Files [a, b]:\n```json\n{}\n```", 1.0, id="brackets before it [MattJColes/lgtmaybe#105]"),
        pytest.param("````json\n{}\n````", 1.0, id="a longer fence"),
        pytest.param("~~~\n{}\n~~~", 1.0, id="tildes"),
        pytest.param("1. ```json\n   {}\n   ```", 1.0, id="within a list"),
        pytest.param("```json\n{}", 1.0, id="a block that is not closed"),
        pytest.param("```json\n{}\n```\n```python\nx\n```", 1.0, id="another language behind it"),
        pytest.param("{} as asked", 0.0, id="text behind it"),
        pytest.param('{"a": 1, "a": 2}', 0.0, id="a key twice [bids-standard/bids-validator#73]"),
        pytest.param("NaN", 0.0, id="NaN"),
        pytest.param("[" * 990 + "]" * 990, 0.0, id="deep [Liquid4All/ifstruct#5]"),
        pytest.param('{"a":' * 100_000, 0.0, id="deep and cut off"),
        pytest.param("9" * 5000, 0.0, id="a huge number"),
        pytest.param('"\\ud83d"', 0.0, id="half of a surrogate pair"),
        pytest.param("\x00\ud800", 0.0, id="bytes of no text"),
    ],
)
def test_json_of_a_response_is_read_within_bounds(completion: str, reward: float) -> None:
    assert _reward(MatchEnvironment(MatchConfig(mode="json")), completion, answer={}) == reward
    schema = {"type": "object", "maxProperties": 0}
    assert _reward(MatchEnvironment(MatchConfig(mode="json_schema")), completion, schema=schema) == reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        pytest.param("<a>x</a> <a>y</a>", "y", id="the last pair [meta-pytorch/torchtune#2604]"),
        pytest.param("<a>x</a> and </a>", "x", id="a closing tag too many"),
        pytest.param("<a> or <a>y</a>", "y", id="an opening tag too many"),
        pytest.param("<a>x</a> <a>y", "x", id="the last is cut off"),
        pytest.param("<a>" * 60_000, None, id="opening tags only"),
        pytest.param("</a>" * 60_000, None, id="closing tags only"),
    ],
)
def test_the_answer_is_between_the_last_pair_of_tags(completion: str, answer: str | None) -> None:
    environment = MatchEnvironment(MatchConfig(answer_tag="a"))
    assert _reward(environment, completion, answer=answer or "none") == float(answer is not None)


def test_a_pattern_that_takes_too_long_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_envs.match.environment.PATTERN_CPU_S", 0.05)
    environment = MatchEnvironment(MatchConfig(mode="regex"))
    assert _reward(environment, "a" * 40, pattern="(a+)+b") == 0.0
    assert _reward(environment, "ab", pattern="(a+)+b") == 1.0
    schemas = MatchEnvironment(MatchConfig(mode="json_schema"))
    assert _reward(schemas, f'"{"a" * 40}"', schema={"pattern": "(a+)+b"}) == 0.0


@pytest.mark.parametrize(
    ("settings", "info", "says"),
    [
        ({"mode": "regex"}, {"pattern": 5}, "`pattern` must .*, got 5"),
        ({"mode": "regex"}, {"pattern": "(" * 500 + "x" + ")" * 500}, "not a regular expression"),
        ({"mode": "regex"}, {"pattern": "a{99999999999}"}, "not a regular expression"),
        ({"mode": "json"}, {"answer": "NaN"}, "NaN is not a number of JSON"),
        ({"mode": "json"}, {"answer": float("nan")}, "NaN is not a number of JSON"),
        ({"mode": "json"}, {"answer": "[" * 40 + "]" * 40}, "more than 32 deep"),
        ({"mode": "json"}, {"answer": {"a": b"x"}}, "not a value of JSON"),
        ({"mode": "json_schema"}, {"schema": "{"}, "not JSON"),
        ({"mode": "json_schema"}, {"schema": {"multipleOf": 0}}, "a number above 0"),
        ({"mode": "json_schema"}, {"schema": {"minimum": "1"}}, "must be a number"),
        ({"mode": "json_schema"}, {"schema": {"required": "a"}}, "a list of names"),
        ({"mode": "json_schema"}, {"schema": {"pattern": "("}}, "a regular expression"),
        ({"mode": "json_schema"}, {"schema": {"items": {"anyOf": [{"enum": 1}]}}}, "'enum' .* must be a list"),
        ({"mode": "json_schema"}, {"schema": {"properties": {"a": {"type": "text"}}}}, r"at properties\.a must be"),
        ({}, {"other": 1}, "'answer'; its fields are other"),
        ({"mode": "regex"}, {"pattern": "("}, "not a regular expression"),
        ({"mode": "json_schema"}, {"schema": {"$ref": "#"}}, r"keywords \$ref .* not supported"),
        ({"mode": "json_schema"}, {"schema": {"type": "text"}}, "several of object"),
    ],
)
def test_a_row_that_cannot_be_compared_is_refused(settings: dict[str, Any], info: dict[str, Any], says: str) -> None:
    config = MatchConfig(**settings)
    with pytest.raises(ValueError, match=says):
        check_row(info, config)
    with pytest.raises(UnusableAnswer, match=says):
        _reward(MatchEnvironment(config), "1", **info)


@pytest.mark.parametrize(
    ("value", "schema", "holds"),
    [
        pytest.param(10**30, {"multipleOf": 7}, False, id="a large number"),
        pytest.param(1e30, {"multipleOf": 7}, False, id="a large float"),
        pytest.param(0.3, {"multipleOf": 0.1}, True, id="a decimal [python-jsonschema/jsonschema#666]"),
        pytest.param(4.02, {"multipleOf": 0.01}, True, id="cents [python-jsonschema/jsonschema#1234]"),
        pytest.param(1e308, {"multipleOf": 1e-308}, True, id="a quotient beyond the floats"),
        pytest.param([*range(100_000)], {"uniqueItems": True}, True, id="many items"),
        pytest.param([1, 1.0], {"uniqueItems": True}, False, id="equal numbers"),
        pytest.param([1, True, "1", None, [1], {"a": 1}], {"uniqueItems": True}, True, id="items of every type"),
        pytest.param([{"a": [1], "b": 2}, {"b": 2, "a": [1.0]}], {"uniqueItems": True}, False, id="equal objects"),
    ],
)
def test_numbers_are_exact_and_items_compared_as_values(value: Any, schema: dict[str, Any], holds: bool) -> None:
    check_schema(schema)
    assert satisfies(value, schema) == holds


PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
        "size": {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 0.1}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ({"name": "Ada"}, True),
        ({"name": "Ada", "age": 36, "tags": ["a", "b"], "size": 0.3}, True),
        ({"name": "Ada", "age": 36.0, "size": None}, True),
        ({}, False),
        ([], False),
        ({"name": ""}, False),
        ({"name": "ada"}, False),
        ({"name": "Ada", "age": -1}, False),
        ({"name": "Ada", "age": 150}, False),
        ({"name": "Ada", "age": True}, False),
        ({"name": "Ada", "age": 1.5}, False),
        ({"name": "Ada", "tags": ["c"]}, False),
        ({"name": "Ada", "tags": ["a", "a"]}, False),
        ({"name": "Ada", "size": "big"}, False),
        ({"name": "Ada", "size": 0.35}, False),
        ({"name": "Ada", "more": 1}, False),
    ],
)
def test_a_schema_holds(value: Any, is_valid: bool) -> None:
    assert satisfies(json.loads(json.dumps(value)), PERSON) == is_valid


def test_schemas_combine() -> None:
    small, even = {"maximum": 10}, {"multipleOf": 2}
    for number in range(20):
        assert satisfies(number, {"allOf": [small, even]}) == (number <= 10 and number % 2 == 0)
        assert satisfies(number, {"oneOf": [small, even]}) == ((number <= 10) != (number % 2 == 0))
        assert satisfies(number, {"not": small}) == (number > 10)
    assert satisfies([1, "a", 2], {"prefixItems": [{"type": "integer"}, {"const": "a"}], "items": {"const": 2}})
    assert not satisfies([1, "a", 3], {"prefixItems": [{"type": "integer"}, {"const": "a"}], "items": {"const": 2}})
