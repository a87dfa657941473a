"""The environment `match`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_core.environment import Conversation, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.match.config import MatchConfig
from rl_envs.match.environment import MatchEnvironment
from rl_envs.match.json_schema import satisfies


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
        ({}, "7", {"answer": 7}, 1.0),
        ({"mode": "contains"}, "it is Paris, I think", {"answer": "Paris"}, 1.0),
        ({"mode": "contains"}, "it is Rome", {"answer": "Paris"}, 0.0),
        ({"mode": "regex"}, "ab12\n", {"pattern": r"[a-z]+\d+"}, 1.0),
        ({"mode": "regex"}, "ab12 and more", {"pattern": r"[a-z]+\d+"}, 0.0),
        ({"answer_tag": "answer"}, "x <answer>a</answer> y <answer>b</answer>", {"answer": "b"}, 1.0),
        ({"answer_tag": "answer"}, "b", {"answer": "b"}, 0.0),
        ({"mode": "json"}, '{"b": 1, "a": [2]}', {"answer": '{"a": [2], "b": 1}'}, 1.0),
        ({"mode": "json"}, 'Here:\n```json\n{"a": 1}\n```', {"answer": {"a": 1}}, 1.0),
        ({"mode": "json"}, '{"a": true}', {"answer": {"a": 1}}, 0.0),
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
    ("settings", "info", "says"),
    [
        ({}, {"other": 1}, "'answer'; its fields are other"),
        ({"mode": "regex"}, {"pattern": "("}, "not a regular expression"),
        ({"mode": "json_schema"}, {"schema": {"$ref": "#"}}, r"keywords \$ref .* not supported"),
        ({"mode": "json_schema"}, {"schema": {"type": "text"}}, "several of object"),
    ],
)
def test_a_row_that_cannot_be_compared_is_refused(settings: dict[str, Any], info: dict[str, Any], says: str) -> None:
    with pytest.raises(UnusableAnswer, match=says):
        _reward(MatchEnvironment(MatchConfig(**settings)), "1", **info)


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
