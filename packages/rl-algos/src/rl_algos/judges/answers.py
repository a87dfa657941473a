"""Answers of judges: their reading, which believes nothing that is not in the form, and their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.rollouts.json_schema import check_schema, satisfies
from rl_core.rollouts.judging import Question
from rl_core.rollouts.model_json import MalformedJson, read_model_json
from rl_core.rollouts.thoughts import THOUGHTS, final_text

MAX_REASON = 200
"""Maximum number of characters of the reason that there is no answer."""

REDRAW_TEMPERATURE = 1.0
"""Minimum temperature of a second answer to a question: a greedy one would be the first again."""

REQUEST_TOKENS = 256
"""Upper bound of the tokens that a chat template adds to a request."""

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(?P<inside>.*)\n[ \t]*```", re.DOTALL)
_MESSAGE_TOKENS = 32


@dataclass(frozen=True)
class JudgeAnswer:
    """The answer of a judge to a question, before it is read.

    Args:
        text: Text of the answer, without thoughts.
        num_tokens: Number of tokens of question and answer.
        failure: Reason in one line that there is no answer; empty if there is one.
        is_final: True if asking once more would not help, because the question or the judge is at fault.
    """

    text: str = ""
    num_tokens: int = 0
    failure: str = ""
    is_final: bool = False


class UnreadableAnswer(ValueError):
    """An answer that is not in its form; the message has the reason."""


def read_answer(text: str, form: Mapping[str, Any] | None) -> Any:
    """Return the value of an answer.

    The whole text, after thoughts that it begins with and without a fence around it, must be one JSON value of the
    form. JSON within other text is not looked for, because a judge may repeat what a policy wrote, and that may imitate
    a verdict, or the end of thoughts and a verdict after it.

    Args:
        text: Text of the answer.
        form: JSON schema of the value; None for the text itself.

    Raises:
        UnreadableAnswer: If it is not in the form.
    """
    text = text.strip()
    if text.startswith(tuple(THOUGHTS)):
        text = final_text(text).strip()
    if form is None:
        if not text:
            raise UnreadableAnswer("it is empty")
        return text
    if fenced := _FENCED.fullmatch(text):
        text = fenced["inside"]
    try:
        value = read_model_json(text)
    except MalformedJson as error:
        raise UnreadableAnswer(str(error)) from None
    if not satisfies(value, form):
        raise UnreadableAnswer("it is JSON that is not in the form of a verdict")
    return value


def form_problem(question: Question) -> str:
    """Return the reason that answers to a question cannot be checked; empty if they can."""
    try:
        check_schema({} if question.form is None else dict(question.form))
    except ValueError as error:
        return str(error)
    return ""


def max_tokens_of(question: Question, max_new_tokens: int) -> int:
    """Return an upper bound of the tokens that a question and its answer take.

    No tokenizer makes more tokens of a text than it has bytes; templates add some to each message and request.
    """
    # Some services put the form into the prompt.
    texts = [json.dumps(part, ensure_ascii=False) for part in (*map(dict, question.messages), question.form)]
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return num_bytes + _MESSAGE_TOKENS * len(texts) + REQUEST_TOKENS + max_new_tokens


def one_line(text: str) -> str:
    """Return the beginning of a text as one line that a log and a terminal can show."""
    shown = "".join(each if each.isprintable() else " " for each in text[: 4 * MAX_REASON])
    shown = " ".join(shown.split())
    return shown if len(shown) <= MAX_REASON else shown[: MAX_REASON - 3] + "..."
