"""Rollouts as a page shows them: records with bounded texts, previews, and the conditions that need a whole record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl_core.config.tree import mapped
from rl_core.rollouts.record import segments_of, turns_of
from rl_launch.session.directory.run_images import text_of_content
from rl_launch.show.condition import Condition
from rl_launch.show.selection import RecordValues, response_of

MOST_CHARACTERS = 200_000
"""Maximum length of a string in a record; the raw record has the whole of it."""

_PREVIEW = 160


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the rollout in a line, or None if it is not one. Entries of another type than a run writes are replaced,
    so that a foreign file can be read."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    prompt, turns, rewards = record.get("prompt"), record.get("turns"), record.get("rewards")
    segments = segments_of(record)
    messages = prompt if isinstance(prompt, list) else [] if prompt is None else [prompt]
    return {
        **record,
        "prompt": [each if isinstance(each, dict) else {"role": "user", "content": str(each)} for each in messages],
        "turns": [each for each in turns if isinstance(each, dict)] if isinstance(turns, list) else [],
        "rewards": {str(name): value for name, value in rewards.items() if _is_number(value)}
        if isinstance(rewards, dict)
        else {},
        **({"segments": segments} if segments else {}),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bounded(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose strings are cut at `MOST_CHARACTERS`."""
    found: dict[str, Any] = mapped(record, lambda _, value: _cut(value) if isinstance(value, str) else value)
    return found


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n... ({len(text) - MOST_CHARACTERS:,} more characters: see the raw record)"


def previews(record: dict[str, Any]) -> dict[str, str]:
    """Return the beginnings of the last message of the prompt and of the response, each on one line."""
    last = record["prompt"][-1] if record["prompt"] else {}
    return {"prompt": _line(text_of(last.get("content"))), "response": _line(response_of(record))}


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts; images are named."""
    return text_of_content(content)


def _line(text: str) -> str:
    return " ".join(text[: 4 * _PREVIEW].split())[:_PREVIEW]


class _NearValues(RecordValues):
    """Values by key, of which the last name of a path suffices: `format` for `rewards.format`."""

    def __getitem__(self, key: str) -> Any:
        paths = (key, *(f"{section}.{key}" for section in ("rewards", "row", "info")))
        return next(
            (value for path in paths if (value := super(_NearValues, self).__getitem__(path)) is not None), None
        )


class Matcher:
    """Decides which records are shown, by their text and by conditions.

    Args:
        text: Must be in the prompt, the response, an observation or the reason of the failure, in any case; empty for
            all records.
        conditions: Conditions as of `rl show --where`, which must all hold.
    """

    def __init__(self, text: str, conditions: Sequence[Condition]) -> None:
        self._text = text.casefold()
        self._conditions = conditions

    @property
    def is_needed(self) -> bool:
        """True if some record may not match."""
        return bool(self._text or self._conditions)

    def matches(self, record: dict[str, Any]) -> bool:
        """Return whether a record is shown."""
        values = _NearValues(record)
        if not all(condition.holds(values) for condition in self._conditions):
            return False
        return not self._text or any(self._text in text.casefold() for text in _texts(record))


def _texts(record: dict[str, Any]) -> list[str]:
    found = [text_of(message.get("content")) for message in record["prompt"]]
    for segment in segments_of(record):
        found += [text_of(message.get("content")) for message in segment["messages"]]
    for turn in turns_of(record):
        found += [text_of(turn.get("text")), _observed(turn.get("observation"))]
    return [*found, str(record.get("failure") or "")]


def _observed(observation: Any) -> str:
    if isinstance(observation, str) or observation is None:
        return observation or ""
    return json.dumps(observation, ensure_ascii=False)
