"""A row as a conversation with its answer or with responses to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.messages import as_messages, as_tools, conversation, is_plain_text, shown
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
        scores: Scores for several objectives, by name.
        is_desirable: True if it is a good one; None if it is not known.
        step_labels: Label of each step of the response, from 0 (wrong) to 1 (right); `messages` is then one message for
            each step. Empty if its steps have no labels.
    """

    messages: tuple[Message, ...]
    rank: float | None = None
    score: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    is_desirable: bool | None = None
    step_labels: tuple[float, ...] = ()


@dataclass(frozen=True)
class Example:
    """A row as a processor returns it.

    Args:
        messages: The conversation; a training conversation may end with the assistant's message.
        answer: The right answer; None if the row has none.
        environment: Name of the environment that scores it; empty if the row has none.
        info: Fields that an environment needs in addition to the answer and the fields of the row.
        responses: Responses to the conversation, which then ends before them; for preference data.
        margin: How much one of two responses is better; None if it is not known.
        solution: Text or messages that lead to the answer, learned in its place by supervised fine-tuning; None if
            there are none.
        tools: JSON schemas of the tools that the assistant may call.
        is_text: True if the row gives the conversation as plain text, which is then its only message.
        num_unplaced_images: Images in the row's column of images that the conversation has no place for.
        columns: Columns that it was read from; empty if they are not known.
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
    columns: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_unanswered(self) -> bool:
        """True if it has a solution but no answer that can be compared, like a proof."""
        return self.answer is None and self.solution is not None

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The conversation up to the assistant's last message, if it ends with that."""
        return self.messages[:-1] if self.has_response else self.messages

    @property
    def response(self) -> tuple[Message, ...]:
        """The messages that supervised fine-tuning learns after a conversation that ends before them: the solution, or
        else the answer; empty if the row has neither, or if the conversation ends with an assistant message."""
        said = self.answer if self.solution is None else self.solution
        if self.has_response or said is None:
            return ()
        return conversation(said if isinstance(said, str | list | tuple | dict) else str(said), role="assistant")

    @property
    def has_response(self) -> bool:
        """True if the conversation ends with an assistant message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"


def info_of(example: Example) -> dict[str, Any]:
    """Return the part of a row that an environment gets: its `info`, and the answer if there is one."""
    return dict(example.info) if example.answer is None else {**example.info, "answer": example.answer}


Processor = Callable[[Mapping[str, Any], DatasetConfig], Example]
"""Makes an example of a row, by the settings of its dataset; raises `DataError` for a row of another form."""


def column(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's column, or a field of an object in it, as `reward_model.ground_truth`.

    Raises:
        DataError: With the nearest column and all others, if there is no such column.
    """
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    if dot and isinstance(row.get(outer), Mapping):
        return column(row[outer], inner)
    raise DataError(_no_column(row, name))


def _no_column(row: Mapping[str, Any], name: str) -> str:
    padded = next((other for other in row if other.strip() == name), None)
    near = did_you_mean(name, row) if padded is None else f"; {padded!r} has white space around it; remove it"
    return f"no column {name!r}{near}; the columns are {', '.join(sorted(row))}"


def images_column(row: Mapping[str, Any], key: str | None) -> tuple[str, Sequence[Any]]:
    """Return the name of a row's column of images, empty if it has none, and the images in it.

    Args:
        row: Row as it was read.
        key: `images_key` of its dataset.

    Raises:
        DataError: If the row has no column `key`.
    """
    if key is not None:
        name, value = key, column(row, key)
    else:
        there = [name for name in IMAGE_COLUMNS if name in row]
        name = next((name for name in there if row[name] is not None), there[0] if there else "")
        value = row.get(name)
    if value is None:
        return name, ()
    return name, [each for each in value if each is not None] if isinstance(value, list | tuple) else [value]


def text_column(row: Mapping[str, Any], name: str) -> str:
    """Return a row's string column; raise a `DataError` if it is missing or something else."""
    value = column(row, name)
    if not isinstance(value, str):
        raise DataError(f"{name!r} must be a string, got {value!r}")
    return value


PLACE = "<image>"
"""Text that an image of the row's column takes the place of."""
IMAGE_COLUMNS = ("images", "image")
"""Names of a row's column of images."""
CONVERSATIONS = ("messages", "conversations", "conversation", "contents")
"""Columns of a whole conversation: of OpenAI's form, ShareGPT and Gemini."""
TEXTS = ("prompt", "query", "question", "instruction", "input")
"""Columns of an input, in the order in which they are looked for."""
WRITTEN = ("completion", "response", "output")
"""Columns next to an input with the text that supervised fine-tuning learns."""

SYSTEM = ("system", "system_prompt", "system_message", "system_instruction", "systemInstruction")
"""Columns of a system message."""
_BESIDE = ("context", "passage", "document", "documents", "article", "knowledge", "choices", "options", "problem")
"""Columns that may be a part of an input in another column."""
_HINTS = {
    "text": "`processor: text` learns the whole column `text`",
    "problem": "`processor: math_problem` reads `problem` and `answer`",
    "chosen": "`chosen` and `rejected` are for preferences (dpo, rm)",
    "input_ids": "rows are tokenised here, from text or messages",
}


class RowInput(NamedTuple):
    """The input of a row.

    Attributes:
        messages: The conversation, with the row's system message.
        is_text: True if the row gives it as plain text, without a system message.
        written: Text or messages in a column next to an input, to learn; None if there is none.
        columns: Columns that were read.
    """

    messages: tuple[Message, ...]
    is_text: bool
    written: Any
    columns: tuple[str, ...]


def read_input(row: Mapping[str, Any], settings: DatasetConfig) -> RowInput:
    """Read the input of a row from the column `input_key`, or from the columns of a common format.

    These are `CONVERSATIONS`, or else one of `TEXTS` with one of `WRITTEN`. An `instruction` is continued by the column
    `input` (Alpaca), and a `history` of pairs precedes an input of text. A column of `SYSTEM` is the system message.

    Raises:
        DataError: If no column is an input, another one may be a part of it, or there are two system messages.
    """
    there = [name for name in (*CONVERSATIONS, *TEXTS) if name in row]
    name = settings.input_key or next((name for name in there if row[name] is not None), (there or [""])[0])
    if not name:
        hint = next((f" ({hint})" for known, hint in _HINTS.items() if row.get(known) is not None), "")
        raise DataError(
            f"{_no_column(row, 'messages')}. Set `input_key` to the column of the input and `output_key` to the column "
            f"of the answer, or set `processor`{hint}"
        )
    given, used = column(row, name), [name]
    messages, is_text = conversation(given), is_plain_text(given)
    is_pair = settings.input_key is None and name in TEXTS
    if is_pair and is_text:
        if name == "instruction" and row.get("input"):
            messages = ({"role": "user", "content": f"{given}\n{text_column(row, 'input')}"},)
            used.append("input")
        if row.get("history"):
            messages, is_text = (*_history(row["history"]), *messages), False
            used.append("history")
    if is_pair and name != "prompt" and settings.prompt_file is None:
        _check_alone(row, name, used)
    messages, system = with_system(messages, row)
    written = next((each for each in WRITTEN if is_pair and row.get(each) is not None), None)
    used += [each for each in (system, written) if each]
    return RowInput(messages, is_text and not system, None if written is None else row[written], tuple(used))


def with_system(messages: tuple[Message, ...], row: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    """Return a conversation with the system message in a column of its row, and the name of the column; as it is, and
    an empty name, if there is none.

    Raises:
        DataError: If the conversation begins with another system message, or the column is not text.
    """
    name = next((name for name in SYSTEM if row.get(name)), "")
    if not name:
        return messages, ""
    given = row[name]
    text = as_messages([{**given, "role": "system"}])[0]["content"] if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        raise DataError(f"the column `{name}` is the system message and must be a string, got {shown(given)}")
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return ({"role": "system", "content": text}, *messages) if text.strip() else messages, name
    if text.strip() and text != first["content"]:
        places = f"in its conversation and another one in the column `{name}`"
        raise DataError(f"the row has a system message {places}; remove one")
    return messages, name


def _history(value: Any) -> tuple[Message, ...]:
    """Return the turns before an input from pairs of texts of the user and the assistant."""
    pairs = value if isinstance(value, list | tuple) else ()
    texts = [text for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2 for text in pair]
    if len(texts) != 2 * len(pairs) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"`history` must be a list of pairs of text, [[user, assistant], ...], got {shown(value)}")
    roles = ("user", "assistant")
    return tuple({"role": roles[index % 2], "content": text} for index, text in enumerate(texts))


def _check_alone(row: Mapping[str, Any], name: str, used: Sequence[str]) -> None:
    """Raise a `DataError` if a column next to a guessed input may be a part of it."""
    other = next((each for each in (*_BESIDE, *TEXTS) if each not in used and row.get(each)), None)
    if other is None:
        return
    processors = {"choices": "multiple_choice", "options": "multiple_choice", "context": "squad"}
    hint = f", or `processor: {processors[other]}`" if name == "question" and other in processors else ""
    problem = f"the columns `{name}` and `{other}` may both be a part of the input"
    raise DataError(f"{problem}. Set `input_key: {name}` to use only that one, `prompt_file` to write both{hint}")


def plain_text(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Return the column `text`, or `input_key`, as the assistant's text, for a chat template that writes only
    contents."""
    return Example(({"role": "assistant", "content": text_column(row, settings.input_key or "text")},))


def by_keys(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Return input and answer from the columns `input_key` and `output_key`.

    If unset, they are found by the columns that common formats have: see `read_input`. The answer is
    the column `answer`, or next to an input of text one of `completion`, `response` and `output`. A row with an
    `answer` and one of these is rewarded by the first and learns the second.
    """
    read = read_input(row, settings)
    written, reward_model = read.written, row.get("reward_model")
    if settings.output_key is not None:
        answer, written = column(row, settings.output_key), None
        answered = settings.output_key
    elif row.get("answer") is not None:
        answer, answered = row["answer"], "answer"
    elif isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        # The rows of verl have their answer here.
        answer, answered = reward_model["ground_truth"], "reward_model"
    else:
        answer, written, answered = written, None, ""
    info = row.get("info") or {}
    if not isinstance(info, Mapping):
        raise DataError(f"the column 'info' must hold an object, got {info!r}")
    return Example(
        read.messages,
        answer,
        str(row.get("environment") or ""),
        info,
        solution=written,
        tools=as_tools(row.get("tools")),
        is_text=read.is_text,
        columns=tuple(name for name in (*read.columns, answered, "tools") if name in row),
    )
