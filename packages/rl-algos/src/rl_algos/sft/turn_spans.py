"""The part of a rendered conversation that each turn of the assistant adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from rl_algos.rollouts.turn_ends import POLICY_MARK, find_turn_ends
from rl_algos.sft.marked_template import Span, has_marks, render_marked
from rl_algos.tokenizer import render
from rl_algos.tool_calls.formats import format_of
from rl_core.errors import DataError
from rl_core.rollout import Message

_THOUGHTS_END = "</think>"


@dataclass(frozen=True)
class LearnedTurns:
    """The turns to learn of a rendered conversation.

    Args:
        text: The whole conversation.
        spans: Start and end of each turn in the text, in order: what the assistant says, with the token that ends it.
        is_open: Whether the last of them is also the end of the text and nothing ends it.
    """

    text: str
    spans: tuple[Span, ...]
    is_open: bool


def find_turns(
    tokenizer: Any, messages: Sequence[Message], learned: Sequence[bool], tools: Sequence[Mapping[str, Any]] = ()
) -> LearnedTurns:
    """Find the turns to learn: what the template marks by `{% generation %}`, or, in a template without marks, what a
    rendered turn adds to the prompt before it.

    Each turn is proven: it begins behind its prompt, holds what the message says and no other message, and ends with
    one token that ends a turn.

    Args:
        messages: Without the flags that say what is learned.
        learned: By message.
        tools: JSON schemas of the tools that the assistant may call.

    Raises:
        DataError: if the template does not tell a turn apart.
        jinja2.TemplateError: if the template refuses the messages.
    """
    conversation = _Conversation(tokenizer, messages, tools)
    conversation.check_tools()
    wanted = [index for index, flag in enumerate(learned) if flag]
    if has_marks(tokenizer.get_chat_template()):
        text, parts = conversation.marked(wanted)
    else:
        text = conversation.render(len(messages))
        parts = {index: [conversation.added(text, index)] for index in wanted}
    ends = _ends_of(tokenizer, str(tokenizer.get_chat_template()))
    spans, is_ended = [], True
    for index, several in parts.items():
        *earlier, last = several
        closed, is_ended = ends.closed(text, last)
        turn = [*earlier, closed]
        _check_said(messages[index], index, "".join(text[start:end] for start, end in turn))
        spans += [span for span in turn if span[1] > span[0]]
    return LearnedTurns(
        text, tuple(spans), is_open=not is_ended and not text[spans[-1][1] :].strip() if spans else False
    )


@dataclass(frozen=True)
class _Ends:
    """Tokens that end a turn.

    Args:
        turn: Those at which the policy stops.
        special: All special tokens, the longest first.
    """

    turn: tuple[str, ...]
    special: tuple[str, ...]

    def closed(self, text: str, span: Span) -> tuple[Span, bool]:
        """A span up to the token that ends its turn, and whether there is one; white space behind the token is left
        out."""
        start, end = span
        end = start + len(self.without(text[start:end]))
        said, rest = text[start:end].rstrip(), text[end:]
        gap = len(rest) - len(rest.lstrip())
        follows = _prefix(rest[gap:], self.turn)
        if follows:
            return (start, end + gap + len(follows)), True
        follows = _prefix(rest, self.special)
        if follows:
            return (start, end + len(follows)), True
        if said.endswith(self.special):
            return (start, start + len(said)), True
        return span, False

    def without(self, turn: str) -> str:
        """A turn without the tokens that end it, and without white space behind them."""
        while (said := turn.rstrip()).endswith(self.turn):
            turn = said.removesuffix(next(end for end in self.turn if said.endswith(end)))
        return turn


@lru_cache(maxsize=8)
def _ends_of(tokenizer: Any, template: str) -> _Ends:
    special = sorted((str(token) for token in tokenizer.added_tokens_decoder.values() if token.special), key=len)
    marks = find_turn_ends(tokenizer, format_of(template).ends).marks
    return _Ends(tuple(sorted(marks, key=len, reverse=True)), tuple(reversed(special)))


class _Conversation:
    """Renders the beginnings of a conversation, each once."""

    def __init__(self, tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._tools = tools

    def check_tools(self) -> None:
        """Raise a `DataError` if the template does not show the tools, so that calls would be learned without them."""
        if not self._tools:
            return
        text = self.render(len(self._messages))
        if text == render(self._tokenizer, self._messages, add_generation_prompt=False):
            raise DataError(
                "the row has `tools`, which the chat template does not show; set policy.tokenizer.chat_template to one "
                "that does, or remove the column"
            )

    def render(self, count: int, *more: Message, prompts: bool = False) -> str:
        """The first messages, and more behind them; up to the start of the assistant's turn if it prompts."""
        shown = [*self._messages[:count], *more]
        return render(self._tokenizer, shown, add_generation_prompt=prompts, tools=self._tools)

    def added(self, text: str, index: int) -> Span:
        """The part of the text that a message of the assistant adds to its prompt.

        Raises:
            DataError: if the template rewrites the turn once others follow, or does not keep its prompt.
        """
        turn = self.render(index + 1)
        ends = _ends_of(self._tokenizer, str(self._tokenizer.get_chat_template()))
        said = turn if text.startswith(turn) else ends.without(turn)
        if not text.startswith(said):
            raise DataError(
                f"the chat template rewrites earlier turns, so what the assistant says in message {index} cannot be "
                "told from the rest; set policy.tokenizer.chat_template to one that marks it with {% generation %}, "
                "or sft.learn: last, if the last turn is the one to learn"
            )
        return self._start(turn, index), len(said)

    def _start(self, turn: str, index: int) -> int:
        """Where a turn begins behind its prompt, in the rendered turn."""
        prompt = self._prompt(index)
        if turn.startswith(prompt):
            return len(prompt)
        # a prompt may open a thought that the template leaves out of the turn: the turn begins where they part
        before = self.render(index) if index else ""
        shown = self.render(index, {"role": "assistant", "content": POLICY_MARK})
        shared = _shared(prompt, shown)
        if shared < len(before) or not turn.startswith(prompt[:shared]):
            raise DataError(
                f"the chat template renders the messages before message {index} in another way once the assistant has "
                "answered, so its turn cannot be told from the rest; set policy.tokenizer.chat_template to one that "
                "marks it with {% generation %}"
            )
        return shared

    def _prompt(self, index: int) -> str:
        """The conversation up to the start of a turn; also of a turn that nothing precedes."""
        if index:
            return self.render(index, prompts=True)
        shown = self.render(0, {"role": "assistant", "content": POLICY_MARK})
        header = _header(self._tokenizer, str(self._tokenizer.get_chat_template()))
        opening = shown.partition(POLICY_MARK)[0]
        start = opening.rfind(header) + len(header) if header and header in opening else len(opening)
        return opening[:start]

    def marked(self, wanted: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """The text, and the marked parts of each wanted message.

        Raises:
            DataError: if a message has no marked part, or a part covers another message.
        """
        text, spans = render_marked(self._tokenizer, self._messages, self._tools)
        of_message = self._by_message(spans)
        found = {index: [self._behind_prompt(text, span, index) for span in of_message[index]] for index in wanted}
        if not any(end > start for several in found.values() for start, end in several):
            raise DataError("the chat template's {% generation %} block marks nothing of this conversation")
        return text, {index: several for index, several in found.items() if several}

    def _by_message(self, spans: Sequence[Span]) -> dict[int, list[Span]]:
        """The marked parts by the message of the assistant that adds them."""
        speaks = [index for index, message in enumerate(self._messages) if message["role"] == "assistant"]
        if len(spans) == len(speaks):
            return {index: [span] for index, span in zip(speaks, spans, strict=True)}
        # a message may have several parts, or none: what it adds to the parts before it
        counts = [self._num_marked(count) for index in speaks for count in (index, index + 1)]
        before, after = counts[::2], counts[1::2]
        if before != [0, *after[:-1]] or after[-1] != len(spans):
            raise DataError(
                f"the chat template marks {len(spans)} parts by {{% generation %}} for {len(speaks)} messages of the "
                "assistant, which cannot be told apart; set policy.tokenizer.chat_template to one that marks each "
                "message by blocks of its own"
            )
        return {index: list(spans[start:end]) for index, start, end in zip(speaks, before, after, strict=True)}

    def _num_marked(self, count: int) -> int:
        return len(render_marked(self._tokenizer, self._messages[:count], self._tools)[1]) if count else 0

    def _behind_prompt(self, text: str, span: Span, index: int) -> Span:
        """A marked part without the prompt of its turn, which a block may include."""
        start, end = span
        before = self.render(index) if index else ""
        prompt = self._prompt(index)
        if text.startswith(before) and start < len(before):
            raise DataError(
                f"the chat template's {{% generation %}} block for message {index} covers messages before it; set "
                "policy.tokenizer.chat_template to one that marks only what the assistant says"
            )
        if text.startswith(prompt):
            start = max(start, len(prompt))
        return start, max(start, end)


@lru_cache(maxsize=8)
def _header(tokenizer: Any, template: str) -> str:
    """Beginning of a turn of the assistant, such as `<|im_start|>assistant`; empty if the template writes none."""
    asked: Message = {"role": "user", "content": POLICY_MARK}
    try:
        shown = render(tokenizer, [asked], add_generation_prompt=False)
        prompt = render(tokenizer, [asked], add_generation_prompt=True)
    except TemplateError:
        return ""
    return prompt.removeprefix(shown) if prompt.startswith(shown) else ""


def _check_said(message: Message, index: int, turn: str) -> None:
    """Refuse a turn that lacks what its message says; thoughts and the words beside a tool call may be left out."""
    unwritten = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    unwritten = [name for name in unwritten if name not in turn]
    if unwritten:
        raise DataError(
            f"the chat template does not write the call of {unwritten[0]!r} in message {index}; set "
            "policy.tokenizer.chat_template to one that writes tool calls, or leave such rows out of the data"
        )
    content = message.get("content")
    if not isinstance(content, str) or message.get("tool_calls"):
        return
    said = "".join(content.rpartition(_THOUGHTS_END)[2].split())
    if said not in "".join(turn.split()):
        raise DataError(
            f"the chat template renders message {index} of the assistant without what it says: got {turn[:80]!r} for "
            f"{content[:80]!r}; set policy.tokenizer.chat_template to one that keeps it"
        )


def _shared(first: str, second: str) -> int:
    """Length of the common beginning of two strings."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _prefix(text: str, tokens: Sequence[str]) -> str:
    return next((token for token in tokens if text.startswith(token)), "")
