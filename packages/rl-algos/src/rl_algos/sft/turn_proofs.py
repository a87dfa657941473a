"""Check that a learned turn has the text of its message, and ends once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rl_algos.tokenizer import squeezed
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import THOUGHT_KEYS, THOUGHTS

_THINK = ("<think>", "</think>")
_WORD = re.compile("[A-Za-z0-9]+")


def check_turn(message: Message, index: int, opened: str, turn: str, ends: Sequence[str]) -> None:
    """Raise a `DataError` if a learned turn lacks a part of its message, or the message ends its turn itself.

    Args:
        message: Message that the turn was rendered from.
        index: Index of the message in its conversation, for error messages.
        opened: Rendered text between the messages before it and the text to learn, which the prompt contains.
        turn: Rendered text to learn, with the token that ends it.
        ends: Tokens that end the policy's turn.
    """
    place = f"message {index} (from 0) of the assistant"
    content = message.get("content")
    written = next((token for token in ends if isinstance(content, str) and token in content), None)
    if written is not None:
        raise DataError(
            f"{place} contains {written!r}, the token that ends a turn, so the model would learn to stop there. Remove "
            "it from the data, because the chat template writes the end of a turn"
        )
    if content and _thinks_twice(str(content), opened + turn):
        raise DataError(
            f"the chat template writes its own thought before the thought of {place}: {_short(opened + turn)}; "
            f"write the thoughts in {_THINK[0]}{_THINK[1]}, or set policy.tokenizer.chat_template to a template that "
            "finds them"
        )
    shown = squeezed(turn)
    for what, part in _parts(message):
        if squeezed(part) not in shown:
            raise DataError(
                f"the chat template leaves out {what} of {place}: {_short(part)} is not in {_short(turn)}; set "
                f"policy.tokenizer.chat_template to a template that writes it, or remove {what} from the data"
            )


def _thinks_twice(content: str, written: str) -> bool:
    """Return whether the template opens or closes a thought around a content that does so itself."""
    first = next((mark for mark in THOUGHTS if content.lstrip().startswith(mark)), None)
    opens_twice = first is not None and written.count(first) > content.count(first)
    return opens_twice or any(written.count(end) > max(1, content.count(end)) for end in THOUGHTS.values())


def check_arguments(message: Message, index: int, turn: str) -> None:
    """Raise a `DataError` if a learned turn lacks a value in the arguments of a call, which its template may write
    outside of the part that it marks; see `check_turn` for the arguments."""
    shown = squeezed(turn)
    missing = next((word for word in _argument_words(message) if word not in shown), None)
    if missing is not None:
        raise DataError(
            f"the chat template writes {missing!r}, an argument of a call, outside of message {index} (from 0) of the "
            f"assistant: {_short(turn)}; set policy.tokenizer.chat_template to a template that writes it in the turn"
        )


def _argument_words(message: Message) -> Iterator[str]:
    """Yield the words and numbers in the arguments of calls, which are the same in every notation of a string."""
    values = [call.get("function", call).get("arguments") for call in message.get("tool_calls") or ()]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, str | int) and not isinstance(value, bool):
            yield from _WORD.findall(str(value))


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the parts of a message, with a name: thoughts, text, and calls."""
    calls = message.get("tool_calls") or ()
    for call in calls:
        yield "the call", str(call.get("function", call).get("name", ""))
    content = message.get("content")
    content = content if isinstance(content, str) else ""
    inner, mark, said = content.rpartition(_THINK[1])
    thoughts = [inner.rpartition(_THINK[0])[2]] if mark else []
    thoughts += [message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str)]
    yield from (("the thoughts", each) for each in thoughts)
    yield "the text", said


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}")
