"""Check of a row's answer, pattern or schema before a run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation
from rl_envs.match.config import MatchConfig
from rl_envs.match.environment import MatchEnvironment
from rl_envs.match.expected import known_json, known_schema, known_texts, read_pattern


def check(info: Mapping[str, Any], config: MatchConfig) -> None:
    """Raise a `ValueError` if the row lacks what its responses are compared with, or no response can match it."""
    match config.mode:
        case "exact" | "contains":
            _require_match(known_texts(info), info, config)
        case "regex":
            read_pattern(info)
        case "json":
            text = json.dumps(known_json(info))
            _require_match([text, text.replace("<", r"\u003c")], info, config)
        case "json_schema":
            known_schema(info)


def _require_match(answers: Sequence[str], info: Mapping[str, Any], config: MatchConfig) -> None:
    """Raise a `ValueError` if none of the answers matches itself."""
    tag = config.answer_tag
    responses = [f"<{tag}>{answer}</{tag}>" if tag else answer for answer in answers]
    turns = [Conversation("", (), info, response) for response in responses]
    if not any(result.reward for result in MatchEnvironment(config).step(turns, [None] * len(turns))):
        is_cut = turns[0].final_text != turns[0].completion
        reason = "it contains a mark of thoughts, which are not graded" if is_cut else f"it contains the tag {tag}"
        raise ValueError(f"no response can match the answer {answers[0]!r:.80}: {reason}")
