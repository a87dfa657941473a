"""The `match` environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.match.config import MatchConfig
from rl_envs.match.json_schema import same_json, satisfies

_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
SHOWN = 200
"""Most characters of an answer that are reported."""


class MatchEnvironment:
    """Scores a single turn: 1 if it matches, 0 otherwise.

    A regular expression that takes too long passes the deadline of the pool, and fails its rollout.
    """

    def __init__(self, config: MatchConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        text = self._answer(conversation.completion)
        matches = self._matches("" if text is None else text, conversation.info) and text is not None
        return StepResult(reward=float(matches), info={"accuracy": float(matches), "answer": (text or "")[:SHOWN]})

    def _answer(self, completion: str) -> str | None:
        tag = self._config.answer_tag
        if tag is None:
            return completion
        tagged = re.findall(f"<{tag}>(.*?)</{tag}>", completion, re.DOTALL)
        return tagged[-1] if tagged else None

    def _matches(self, text: str, info: Mapping[str, Any]) -> bool:
        match self._config.mode:
            case "exact":
                return any(self._plain(text) == self._plain(each) for each in _texts(info))
            case "contains":
                return any(self._plain(each) in self._plain(text) for each in _texts(info))
            case "regex":
                flags = re.DOTALL | (re.IGNORECASE if self._config.ignore_case else 0)
                pattern = str(_field(info, "pattern"))
                try:
                    return re.fullmatch(pattern, text.strip() if self._config.ignore_space else text, flags) is not None
                except re.error as error:
                    raise UnusableAnswer(f"the row's `pattern` is not a regular expression: {error}") from None
            case "json":
                expected = _field(info, "answer")
                value, is_json = _json(text)
                known = _json(expected)[0] if isinstance(expected, str) else expected
                return is_json and same_json(value, known)
            case "json_schema":
                schema = _field(info, "schema")
                value, is_json = _json(text)
                return satisfies(value, json.loads(schema) if isinstance(schema, str) else schema) and is_json

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self._config.ignore_space else text
        return text.casefold() if self._config.ignore_case else text


def _texts(info: Mapping[str, Any]) -> list[str]:
    answer = _field(info, "answer")
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]


def _field(info: Mapping[str, Any], name: str) -> Any:
    if name not in info:
        fields = ", ".join(sorted(map(str, info))) or "none"
        raise UnusableAnswer(f"the row needs the field {name!r}; its fields are {fields}")
    return info[name]


def _json(text: str) -> tuple[Any, bool]:
    """The JSON in a text, and whether there is any."""
    blocks = _JSON_BLOCK.findall(text)
    try:
        return json.loads(blocks[-1] if blocks else text), True
    except (ValueError, RecursionError):
        return None, False
