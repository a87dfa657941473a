"""The environment `match`, its expected answers, and the check of rows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_core.rollouts.json_schema import check_schema, contradiction, same_json, satisfies
from rl_core.rollouts.model_json import MalformedJson, read_model_json
from rl_envs.fences import fenced_blocks
from rl_envs.grader import Grader, fields_of
from rl_envs.match.plugin import MatchConfig
from rl_envs.time_limit import within

SHOWN = 200
"""Maximum number of characters of an answer that are reported."""
PATTERN_CPU_S = 2.0
"""Seconds of processor time for the row's pattern or schema; a response for which that is not enough does not match."""


class MatchEnvironment(Grader[MatchConfig]):
    """Scores a single turn: 1 if it matches, 0 otherwise."""

    def score(self, conversation: Conversation) -> StepResult:
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
            return None  # A pattern that allows the empty text must not pay for thoughts without an answer.
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
            case "json" | "json_schema":
                is_schema = self._config.mode == "json_schema"
                known = known_schema(info) if is_schema else known_json(info)
                try:
                    value = json_in(text)
                except MalformedJson:
                    return False
                if not is_schema:
                    return same_json(value, known)
                return bool(within(PATTERN_CPU_S, lambda: satisfies(value, known)))

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self._config.ignore_space else text
        return text.casefold() if self._config.ignore_case else text


def json_in(response: str) -> Any:
    """Return the value of the last fenced block of JSON or without a language, or else of the whole response.

    Raises:
        MalformedJson: If it is not JSON within the bounds of `read_model_json`: NaN, a key twice in an object and deep
            nesting are not.
    """
    blocks = [body for language, body in fenced_blocks(response) if language in ("json", "")]
    return read_model_json((blocks[-1] if blocks else response).strip().removeprefix("\ufeff"))


def known_texts(info: Mapping[str, Any]) -> list[str]:
    """Return the right answers in `info["answer"]`. A whole number that columnar files made a float is right as `3` and
    as `3.0`.

    Raises:
        ValueError: If there is none, or one is empty, null, true, false or not finite.
    """
    answer = _required(info, "answer")
    answers = answer if isinstance(answer, list | tuple) and answer else (answer,)
    wholes = [int(each) for each in answers if isinstance(each, float) and each.is_integer()]
    texts = []
    for each in (*answers, *wholes):
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise ValueError(f"an answer must be a string or a number, got {each!r:.80}")
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"an answer must be a finite number, got {each!r}")
        # `str` refuses integers of more than 4,300 digits.
        text = f"{Decimal(each):f}" if isinstance(each, int) else str(each)
        if not text.strip():
            raise ValueError("the row's answer is empty, so every response would match or none")
        texts.append(text)
    return texts


def read_pattern(info: Mapping[str, Any], *, ignore_case: bool = False) -> re.Pattern[str]:
    """Return the regular expression `info["pattern"]`.

    Raises:
        ValueError: If it is missing, or not a regular expression.
    """
    pattern = _required(info, "pattern")
    if not isinstance(pattern, str):
        raise ValueError(f"the row's `pattern` must be a regular expression as a string, got {pattern!r:.80}")
    try:
        return re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the row's `pattern` is not a regular expression: {error}") from None


def known_json(info: Mapping[str, Any]) -> Any:
    """Return the JSON value in `info["answer"]`, which may be written as text.

    Raises:
        ValueError: If it is missing, or not JSON within the bounds of `read_model_json`.
    """
    return _plain_json(_required(info, "answer", is_value=True), "answer")


def known_schema(info: Mapping[str, Any]) -> Any:
    """Return the schema in `info["schema"]`, which may be written as text.

    Raises:
        ValueError: If it is missing, is not JSON, or is not a schema that `satisfies` can check.
    """
    schema = _plain_json(_required(info, "schema"), "schema")
    check_schema(schema)
    if problem := contradiction(schema):
        raise ValueError(f"no JSON satisfies the row's `schema`: {problem}")
    return schema


def _required(info: Mapping[str, Any], name: str, *, is_value: bool = False) -> Any:
    if name not in info:
        raise ValueError(f"the row needs the field {name!r}; its fields are {fields_of(info)}")
    if info[name] is None and not is_value:
        raise ValueError(f"the row's field {name!r} is null")
    return info[name]


def _plain_json(value: Any, name: str) -> Any:
    try:
        return _read(value if isinstance(value, str) else json.dumps(value))
    except (ValueError, TypeError, RecursionError) as error:
        kind = "text that is not JSON" if isinstance(value, str) else "not a value of JSON"
        raise ValueError(f"the row's `{name}` is {kind}: {error}") from None


_read = lru_cache(maxsize=1024)(read_model_json)  # All rollouts of a group share their row.


def check_row(info: Mapping[str, Any], config: MatchConfig) -> None:
    """Raise a `ValueError` if the row lacks what its responses are compared with, or no response can match it."""
    match config.mode:
        case "exact" | "contains":
            answers = known_texts(info)
        case "json":
            text = json.dumps(known_json(info))
            answers = [text, text.replace("<", r"\u003c")]
        case "regex":
            read_pattern(info)
            return
        case "json_schema":
            known_schema(info)
            return
    # One of the answers must match itself.
    tag = config.answer_tag
    responses = [f"<{tag}>{answer}</{tag}>" if tag else answer for answer in answers]
    turns = [Conversation("", (), info, response) for response in responses]
    if not any(MatchEnvironment(config).score(turn).reward for turn in turns):
        is_cut = turns[0].final_text != turns[0].completion
        reason = "it contains a mark of thoughts, which are not graded" if is_cut else f"it contains the tag {tag}"
        raise ValueError(f"no response can match the answer {answers[0]!r:.80}: {reason}")
