"""The `match` environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.model_json import MalformedJson, read_model_json
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.fences import fenced_blocks
from rl_envs.match.config import MatchConfig
from rl_envs.match.expected import known_json, known_schema, known_texts, read_pattern
from rl_envs.match.json_schema import same_json, satisfies
from rl_envs.time_limit import within

SHOWN = 200
"""Maximum number of characters of an answer that are reported."""
PATTERN_CPU_S = 2.0
"""Seconds of processor time for the row's pattern or schema; a response for which that is not enough does not match."""


class MatchEnvironment:
    """Scores a single turn: 1 if it matches, 0 otherwise."""

    def __init__(self, config: MatchConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        text = self._answer(conversation)
        try:
            matches = self._matches(text or "", conversation.info) and text is not None
        except ValueError as error:
            raise UnusableAnswer(str(error)) from None
        return StepResult(reward=float(matches), info={"accuracy": float(matches), "answer": (text or "")[:SHOWN]})

    def _answer(self, conversation: Conversation) -> str | None:
        """Return the text of the last pair of tags, or the whole text after the thoughts; None if there is none."""
        text = conversation.final_text
        if not text and (conversation.completion or conversation.opened_thoughts):
            return None  # a pattern that allows the empty text must not pay for thoughts without an answer
        if (tag := self._config.answer_tag) is None:
            return text
        opening, closing = f"<{tag}>", f"</{tag}>"
        start = text.rfind(opening, 0, max(0, text.rfind(closing)))
        if start < 0:
            return None
        start += len(opening)
        return text[start : text.find(closing, start)]

    def _matches(self, text: str, info: Mapping[str, Any]) -> bool:
        match self._config.mode:
            case "exact":
                return any(self._plain(text) == self._plain(each) for each in known_texts(info))
            case "contains":
                return any(self._plain(each) in self._plain(text) for each in known_texts(info))
            case "regex":
                pattern = read_pattern(info, ignore_case=self._config.ignore_case)
                text = text.strip() if self._config.ignore_space else text
                return within(PATTERN_CPU_S, lambda: pattern.fullmatch(text)) is not None
            case "json":
                known = known_json(info)
                return _is_json(text, lambda value: same_json(value, known))
            case "json_schema":
                schema = known_schema(info)
                return _is_json(text, lambda value: bool(within(PATTERN_CPU_S, lambda: satisfies(value, schema))))

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self._config.ignore_space else text
        return text.casefold() if self._config.ignore_case else text


def _is_json(text: str, holds: Callable[[Any], bool]) -> bool:
    """Return whether a text is JSON within bounds of which a condition holds."""
    try:
        value = json_in(text)
    except MalformedJson:
        return False
    return holds(value)


def json_in(response: str) -> Any:
    """Return the value of the last fenced block of JSON or without a language, or else of the whole response.

    Raises:
        MalformedJson: If it is not JSON within the bounds of `read_model_json`: NaN, a key twice in an object and deep
            nesting are not.
    """
    blocks = [body for language, body in fenced_blocks(response) if language in ("json", "")]
    return read_model_json((blocks[-1] if blocks else response).strip().removeprefix("\ufeff"))
