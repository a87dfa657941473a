"""A row as a conversation with its answer or with responses to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.messages import as_tools, conversation, is_plain_text
from rl_core.config import did_you_mean
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message


@dataclass(frozen=True)
class Response:
    """A response to an example's conversation, with the verdict on it.

    Args:
        messages: Messages that follow the conversation; the first is the assistant's.
        rank: Place among the responses to the conversation, lower is better; None if they are not ranked.
        score: Higher is better; None if it is not known.
        is_desirable: True if it is a good one; None if nobody said.
    """

    messages: tuple[Message, ...]
    rank: float | None = None
    score: float | None = None
    is_desirable: bool | None = None


@dataclass(frozen=True)
class Example:
    """A row as a processor returns it.

    Args:
        messages: The conversation; a training conversation may end with the assistant's message.
        answer: The right answer; None if the row has none.
        environment: Name of the environment that scores it; empty if the row names none.
        info: Whatever else an environment needs in addition to the answer and the fields of the row.
        responses: Responses to the conversation, which then ends before them; for preference data.
        margin: How much one of two responses is better; None if it is not known.
        solution: Text or messages that lead to the answer, learned in its place by supervised fine-tuning; None if
            there are none.
        tools: JSON schemas of the tools that the assistant may call.
        is_text: Whether the row gives the conversation as plain text, which is then its only message.
        num_unplaced_images: Images in the row's column of images that the conversation has no place for.
    """

    messages: tuple[Message, ...]
    answer: Any = None
    environment: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    responses: tuple[Response, ...] = ()
    margin: float | None = None
    solution: Any = None
    tools: tuple[Mapping[str, Any], ...] = ()
    is_text: bool = False
    num_unplaced_images: int = 0

    @property
    def is_unanswered(self) -> bool:
        """True if it has a solution but no answer that can be compared, like a proof."""
        return self.answer is None and self.solution is not None

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The conversation up to the assistant's last message, if it ends with that."""
        return self.messages[:-1] if self.has_response else self.messages

    @property
    def has_response(self) -> bool:
        """True if the conversation ends with an assistant message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"


def info_of(example: Example) -> dict[str, Any]:
    """The part of a row that an environment gets: its `info`, and the answer if there is one."""
    return dict(example.info) if example.answer is None else {**example.info, "answer": example.answer}


Processor = Callable[[Mapping[str, Any], DatasetConfig], Example]
"""Makes an example of a row, by the settings of its dataset; raises `DataError` for a row of another form."""


def column(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's column; raises a `DataError` that lists the nearest column and all others."""
    if name not in row:
        raise DataError(_no_column(row, name))
    return row[name]


def _no_column(row: Mapping[str, Any], name: str) -> str:
    padded = next((other for other in row if other.strip() == name), None)
    near = did_you_mean(name, row) if padded is None else f"; {padded!r} has white space around it; remove it"
    return f"no column {name!r}{near}; the columns are {', '.join(sorted(row))}"


def _without_input(row: Mapping[str, Any]) -> str:
    return (
        f"{_no_column(row, 'messages')}. Set `input_key` to the column of the input and `output_key` to the column of "
        "the answer, or set `processor`"
    )


def text_column(row: Mapping[str, Any], name: str) -> str:
    """Return a row's string column; raises a `DataError` if it is missing or something else."""
    value = column(row, name)
    if not isinstance(value, str):
        raise DataError(f"{name!r} must be a string, got {value!r}")
    return value


def by_keys(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Input and answer from the columns `input_key` and `output_key`.

    If unset they are `messages` and `answer`, or, in a row without messages, `prompt` and one of `answer`, `completion`
    and `response`. A row with an `answer` and a `completion` or `response` is rewarded by the first and learns the
    second.
    """
    is_unnamed = settings.input_key is None and "messages" not in row
    is_pair = is_unnamed and "prompt" in row
    if is_unnamed and not is_pair:
        raise DataError(_without_input(row))
    given = column(row, settings.input_key or ("prompt" if is_pair else "messages"))
    messages = conversation(given)
    written = next((row[name] for name in ("completion", "response") if is_pair and row.get(name) is not None), None)
    if settings.output_key is not None:
        answer, written = column(row, settings.output_key), None
    elif row.get("answer") is None:
        answer, written = written, None
    else:
        answer = row["answer"]
    info = row.get("info") or {}
    if not isinstance(info, Mapping):
        raise DataError(f"the column 'info' must hold an object, got {info!r}")
    return Example(
        messages,
        answer,
        str(row.get("environment") or ""),
        info,
        solution=written,
        tools=as_tools(row.get("tools")),
        is_text=is_plain_text(given),
    )
