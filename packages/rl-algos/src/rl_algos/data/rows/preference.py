"""Processors of preference data: a conversation, and responses to it that are compared or judged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import CONVERSATIONS, SYSTEM, TEXTS, Example, Response, column, read_input, with_system
from rl_algos.data.rows.messages import as_tools, conversation, is_plain_text, shown
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

Messages = tuple[Message, ...]

_PROMPT = ("prompt", "messages", "context")
_RESPONSE = ("completion", "response")
_PAIR = ("chosen", "rejected")
_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
_VERDICTS = ("completions", "label", "score", "margin", "tools", "history", *_SCORES[0], *_SCORES[1])
_COLUMNS = frozenset((*_PROMPT, *CONVERSATIONS, *TEXTS, *SYSTEM, *_RESPONSE, *_PAIR, *_VERDICTS))
"""Columns that a row of preferences may be read from."""

_MARKED_ROLES = {"Human": "user", "Assistant": "assistant"}
_MARK = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def preference(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Return the responses and the verdict on them.

    The row has any of these columns:

    - `chosen` and `rejected`: each a string, a list of messages, or the whole conversation, also as one string with
      `Human:` and `Assistant:` before the turns (Anthropic's hh-rlhf). A `margin` or scores (`score_chosen`,
      `score_rejected`) give the difference. UltraFeedback binarized and Tulu 3 have these.
    - `completions`: a list of `{completion, rank}` (lower is better) or `{completion, score}` (higher is better).
    - `completion` with a `label` (whether it is a good one) or a `score`, or with other columns of numbers: scores for
      several objectives, by the names of these columns.
    - `completions`, a list of strings, and `labels`: the steps of one response, each with its label.

    The prompt is a string or a list of messages in `prompt`, `messages` or `context`, or in the column `input_key`.
    Whole conversations need none: the messages that both begin with are the prompt. Nor do two strings, if the row has
    no other column of text: the words that both begin with are the prompt.
    """
    columns = tuple(name for name in row if name in _COLUMNS or name == settings.input_key)
    if "chosen" in row or "rejected" in row:
        return replace(_pair(row, settings), columns=columns)
    responses: tuple[Response, ...]
    if "completions" in row and "labels" in row:
        responses, columns = (_steps(row),), (*columns, "labels")
    elif "completions" in row:
        responses = tuple(_listed(item, index) for index, item in enumerate(_list(row["completions"])))
    elif "completion" in row and ("label" in row or "score" in row):
        messages, label = _response(row["completion"], "completion"), row.get("label")
        responses = (Response(messages, score=_optional(row, "score"), is_desirable=_label(label)),)
    elif "completion" in row and (scores := {name: float(row[name]) for name in row if _is_number(row[name])}):
        responses = (Response(_response(row["completion"], "completion"), scores=scores),)
        columns = (*columns, *scores)
    else:
        raise DataError(
            "expected the columns `chosen` and `rejected`, or `completions`, or `completion` with a `label`, a "
            f"`score` or scores; the columns are {', '.join(sorted(row))}. Map other names in `columns`, such as "
            "{chosen: better, rejected: worse}, or set `processor`"
        )
    prompt = _required_prompt(row, settings)
    return Example(prompt, responses=responses, tools=as_tools(row.get("tools")), columns=columns)


def helpsteer3(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return two responses and an overall preference from -3 (the first is much better) to 3 (HelpSteer3,
    arXiv:2505.11475).

    The margin is the size of the preference; equally good responses have the same rank.
    """
    preferred = column(row, "overall_preference")
    if not _is_number(preferred):
        raise DataError(f"`overall_preference` must be a number from -3 to 3, got {preferred!r}")
    first = Response(_response(column(row, "response1"), "response1"), rank=float(preferred > 0))
    second = Response(_response(column(row, "response2"), "response2"), rank=float(preferred < 0))
    return Example(conversation(column(row, "context")), responses=(first, second), margin=abs(float(preferred)))


def ultrafeedback(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return several responses to an instruction, each with an overall score (UltraFeedback, arXiv:2310.01377)."""
    responses = tuple(
        Response(_response(column(item, "response"), "response"), score=_number(item, "overall_score"))
        for item in _list(column(row, "completions"))
    )
    return Example(conversation(column(row, "instruction")), responses=responses)


def _pair(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    chosen, rejected = (_turns(column(row, name), name) for name in _PAIR)
    whole = [messages[0]["role"] != "assistant" for messages in (chosen, rejected)]
    if _begins_alike(row, settings):
        prompt, chosen, rejected = _split_texts(row["chosen"], row["rejected"])
    elif all(whole):
        prompt, chosen, rejected = _split(chosen, rejected)
        prompt, _ = with_system(prompt, row)
    elif any(whole):
        problem = "one of `chosen` and `rejected` is a whole conversation, the other only the response"
        raise DataError(f"{problem}. Use the same form for both")
    else:
        prompt, chosen, rejected = _with_shared_turns(_required_prompt(row, settings), chosen, rejected)
    better = worse = None
    for names in _SCORES:
        if all(row.get(name) is not None for name in names):
            better, worse = (_number(row, name) for name in names)
            break
    margin = _optional(row, "margin")
    is_reversed = better is not None and worse is not None and better < worse
    if (margin is not None and margin < 0) or is_reversed:
        is_negative = margin is not None and margin < 0
        numbers = f"the margin is {margin:g}" if is_negative else f"their scores are {better:g} and {worse:g}"
        raise DataError(
            f"`chosen` is worse than `rejected` by their numbers: {numbers}. Exchange the columns in `columns`, "
            "correct the numbers, or leave out such rows with data.malformed=skip"
        )
    responses = (Response(chosen, rank=0, score=better), Response(rejected, rank=1, score=worse))
    return Example(prompt, responses=responses, margin=margin, tools=as_tools(row.get("tools")))


def _split(chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """Return the common beginning of two conversations, and how each continues."""
    for name, messages in zip(_PAIR, (chosen, rejected), strict=True):
        if all(message["role"] != "assistant" for message in messages):
            raise DataError(f"`{name}` has no response: the conversation has no assistant message")
    most = min(len(chosen), len(rejected)) - 1
    shared = next((index for index in range(most) if chosen[index] != rejected[index]), most)
    rest = chosen[shared:], rejected[shared:]
    if any(messages[0]["role"] != "assistant" for messages in rest):
        raise DataError(
            f"`chosen` and `rejected` must answer the same conversation, but their messages {shared} (from 0) differ, "
            f"of the roles {rest[0][0]['role']} and {rest[1][0]['role']}; only what the assistant says may differ"
        )
    return chosen[:shared], *rest


def _with_shared_turns(prompt: Messages, chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """Move the turns that both responses begin with to the prompt: they are no reason for the preference."""
    pairs = enumerate(zip(chosen[:-1], rejected[:-1], strict=False))
    shared = next((index for index, (one, other) in pairs if one != other), min(len(chosen), len(rejected)) - 1)
    while shared and not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        shared -= 1
    return (*prompt, *chosen[:shared]), chosen[shared:], rejected[shared:]


def _begins_alike(row: Mapping[str, Any], settings: DatasetConfig) -> bool:
    """Return whether the prompt can only be the common beginning of two strings, because the row has no other text."""
    texts = [row[name] for name in _PAIR]
    if settings.input_key or not all(is_plain_text(text) and _marked_turns(text) is None for text in texts):
        return False
    others = row.keys() - {*_PAIR, "tools", *settings.columns.values()}
    return not any(isinstance(row[name], str | list | tuple | Mapping) for name in others)


def _split_texts(chosen: str, rejected: str) -> tuple[Messages, Messages, Messages]:
    """Return the words that two strings begin with, as the user's message, and how each continues."""
    if chosen == rejected:
        problem = "no prompt: `chosen` and `rejected` are the same string, so the prompt in them cannot be identified"
        raise DataError(f"{problem}. Add a prompt in one of the columns {', '.join(_PROMPT)}")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((place for place, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    # A word whose beginning only is shared belongs to the responses.
    words = chosen[: max(chosen.rfind(space, 0, length) for space in (" ", "\n")) + 1]
    rest = [text[len(words) :].strip() for text in (chosen, rejected)]
    if not words.strip() or not all(rest):
        raise DataError(
            f"no prompt: `chosen` and `rejected` do not begin with the same words. Add a prompt in one of the columns "
            f"{', '.join(_PROMPT)}, set `input_key` to its column, or let both begin with it"
        )
    better, worse = (({"role": "assistant", "content": text},) for text in rest)
    return ({"role": "user", "content": words.strip()},), better, worse


def _steps(row: Mapping[str, Any]) -> Response:
    """Return the response whose steps have labels."""
    steps, labels = _list(row["completions"]), row["labels"]
    if not isinstance(labels, list | tuple) or len(labels) != len(steps):
        raise DataError(f"`labels` must have one label for each of the {len(steps)} steps in `completions`")
    for label in labels:
        if not isinstance(label, bool) and not (_is_number(label) and 0 <= label <= 1):
            raise DataError(f"`labels` must be true, false or numbers from 0 to 1, got {label!r}")
    messages = [_response(step, f"completions[{index}]") for index, step in enumerate(steps)]
    if any(len(turns) > 1 for turns in messages):
        raise DataError("each step in `completions` must be a string")
    return Response(tuple(turns[0] for turns in messages), step_labels=tuple(map(float, labels)))


def _listed(item: Any, index: int) -> Response:
    """Return one of the `completions`."""
    name = next((name for name in _RESPONSE if isinstance(item, Mapping) and name in item), None)
    if name is None:
        raise DataError(f"completions[{index}] must be an object with a `completion`, got {shown(item)}")
    if item.get("rank") is None and item.get("score") is None:
        raise DataError(f"completions[{index}] has neither a `rank` (lower is better) nor a `score` (higher is better)")
    rank = _optional(item, "rank")
    return Response(_response(item[name], f"completions[{index}].{name}"), rank=rank, score=_optional(item, "score"))


def _required_prompt(row: Mapping[str, Any], settings: DatasetConfig) -> Messages:
    name = settings.input_key or next((name for name in (*_PROMPT, *CONVERSATIONS, *TEXTS) if name in row), None)
    if name is None:
        problem = f"no prompt: add it in one of the columns {', '.join(_PROMPT)}, or set `input_key` to its column"
        raise DataError(f"{problem}; the columns are {', '.join(sorted(row))}")
    is_known = settings.input_key is not None or name in _PROMPT
    prompt = with_system(conversation(column(row, name)), row)[0] if is_known else read_input(row, settings).messages
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"the prompt in `{name}` ends with an assistant message; end it with a user message")
    return prompt


def _response(value: Any, name: str) -> Messages:
    """Return the assistant's turns, from text or messages."""
    messages = _turns(value, name)
    if messages[0]["role"] != "assistant":
        role = messages[0]["role"]
        raise DataError(f"`{name}` must begin with an assistant message, but begins with a {role} message")
    return messages


def _turns(value: Any, name: str) -> Messages:
    if isinstance(value, str) and (turns := _marked_turns(value)):
        return turns
    try:
        return conversation(value, role="assistant")
    except DataError as error:
        raise DataError(f"`{name}`: {error}") from None


def _marked_turns(text: str) -> Messages | None:
    r"""Read a conversation in one string, such as `"\n\nHuman: Hi\n\nAssistant: Hello"` (Anthropic's hh-rlhf).

    White space around a turn is left out.

    Returns:
        The messages; None if the text is not such a conversation: it begins with another text, or the assistant has
        no turn.
    """
    marks = list(_MARK.finditer(text))
    if not marks or marks[0][1] != "Human" or marks[0].start() or all(mark[1] == "Human" for mark in marks):
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return tuple(
        {"role": _MARKED_ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    )


def _label(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"  # CSV has no truth values.
    raise DataError(f"`label` must be true for a good completion and false for a bad one, got {value!r}")


def _optional(item: Mapping[str, Any], name: str) -> float | None:
    return None if item.get(name) is None else _number(item, name)


def _number(item: Mapping[str, Any], name: str) -> float:
    value = column(item, name)
    if not _is_number(value):
        raise DataError(f"`{name}` must be a number, got {shown(value)}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"`completions` must be a list of objects, got {shown(value)}")
    return value
