"""The part of a rendered conversation that each turn of the assistant adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from rl_algos.sft.marked_template import Span, has_marks, render_marked, template_of
from rl_algos.sft.turn_proofs import check_arguments, check_turn
from rl_algos.template_coverage import Coverage, thoughts_key
from rl_algos.tokenizer import check_shown, render
from rl_algos.tool_calls.formats import format_of
from rl_algos.turn_ends import find_turn_ends
from rl_core.errors import DataError
from rl_core.facts.template_ends import OTHER_MARK, POLICY_MARK
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import THOUGHT_KEYS
from rl_core.tokenizer import Tokenizer

_ASKED: Message = {"role": "user", "content": POLICY_MARK}


@dataclass(frozen=True)
class LearnedTurns:
    """The turns to learn of a rendered conversation.

    Args:
        text: The whole conversation.
        spans: Start and end of each turn in the text, in order: the assistant's text, with the token that ends it.
        missing_end: Token that ends the last of them, if the text ends without one; otherwise empty.
    """

    text: str
    spans: tuple[Span, ...]
    missing_end: str


def find_turns(
    tokenizer: Tokenizer, messages: Sequence[Message], learned: Sequence[bool], tools: Sequence[Mapping[str, Any]] = ()
) -> LearnedTurns:
    """Find the turns to learn: the parts that the template marks by `{% generation %}`, or, in a template without
    marks, the part that a rendered turn adds to the prompt before it.

    Each turn is proven: it begins after its prompt, holds the message and no other message, and ends with
    one token that ends a turn.

    Args:
        tokenizer: Fast tokenizer with a chat template.
        messages: Messages without the flags that select what is learned.
        learned: True for each message to learn.
        tools: JSON schemas of the tools that the assistant may call.

    Raises:
        DataError: If the template does not tell a turn apart.
        jinja2.TemplateError: if the template refuses the messages.
    """
    conversation = _Conversation(tokenizer, messages, tools)
    conversation.check_tools()
    wanted = [index for index, flag in enumerate(learned) if flag]
    is_marked = has_marks(template_of(tokenizer, tools))
    conversation = conversation if is_marked else conversation.with_empty_thoughts(wanted)
    messages = conversation.messages
    text, parts = conversation.marked(wanted) if is_marked else conversation.unmarked(wanted)
    check_shown(messages, text)
    coverage = Coverage(tokenizer, messages, text, tools=tools)
    coverage.check_links()
    ends = conversation.ends
    spans, end = [], ""
    said: dict[int, str] = {}
    for index, several in parts.items():
        *earlier, last = several
        closed, end = ends.closed(text, last)
        if not end and text[closed[1] :].strip():
            raise _never_ends(index, ends)
        turn = [*earlier, closed]
        opened = text[conversation.length_before(text, index) : turn[0][0]]
        said[index] = "".join(text[start:stop] for start, stop in turn)
        check_turn(messages[index], index, opened, said[index], ends.turn)
        spans += [span for span in turn if span[1] > span[0]]
    coverage.check_pieces(learned)
    for index, turn_text in said.items():
        check_arguments(messages[index], index, turn_text)
    return LearnedTurns(text, tuple(spans), "" if end else conversation.end_of_open_turn())


def _never_ends(index: int, ends: TurnClosing) -> DataError:
    return DataError(
        f"the chat template does not end message {index} (from 0) of the assistant with a token at which the model "
        f"stops ({', '.join(ends.turn)}), because other messages follow; set sft.learn: last, if the last turn is the "
        "one to learn, or policy.tokenizer.chat_template to one that ends every turn"
    )


class _Conversation:
    """Renders the beginnings of a conversation, each once."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self.messages = messages
        self._tools = tools
        self._rendered: dict[tuple[int, bool], str] = {}
        self._template = str(tokenizer.get_chat_template())
        self.ends = ends_of(tokenizer, self._template)

    def with_empty_thoughts(self, wanted: Sequence[int]) -> _Conversation:
        """Return the conversation with empty thoughts that stay, if the template writes them in a turn that nothing
        follows and drops them once a message follows, as Qwen3's does with a call.

        A model that calls a tool in such a turn has written them. Templates keep thoughts that contain white space.
        """
        key = thoughts_key(self._tokenizer, template_of(self._tokenizer, self._tools))
        dropped = [index for index in wanted if key and self._loses_empty_thoughts(index)]
        if not dropped:
            return self
        kept = [{**each, key: "\n"} if index in dropped else each for index, each in enumerate(self.messages)]
        longer = _Conversation(self._tokenizer, kept, self._tools)
        try:
            is_same = all(longer.render(index + 1) == self.render(index + 1) for index in dropped)
            return longer if is_same and not any(map(longer._is_rewritten, dropped)) else self
        except TemplateError:
            return self

    def _loses_empty_thoughts(self, index: int) -> bool:
        message = self.messages[index]
        has_thoughts = any(message.get(key) for key in THOUGHT_KEYS) or "</think>" in str(message.get("content"))
        return not has_thoughts and self._is_rewritten(index)

    def _is_rewritten(self, index: int) -> bool:
        """Return whether a turn that the template rendered last is different once other messages follow."""
        text, turn = self.render(len(self.messages)), self.render(index + 1)
        before = self.length_before(turn, index)
        return not text.startswith(turn) and not text.startswith(turn[:before] + self.ends.without(turn[before:]))

    def length_before(self, text: str, index: int) -> int:
        """Return the number of characters of a rendered text that the messages before one take."""
        return _shared(self.render(index), text) if index else 0

    def check_tools(self) -> None:
        """Raise a `DataError` if the template does not show the tools, so that calls would be learned without them."""
        if not self._tools:
            return
        text = self.render(len(self.messages))
        if text == render(self._tokenizer, self.messages, add_generation_prompt=False):
            raise DataError(
                "the row has `tools`, but the chat template does not show them; set policy.tokenizer.chat_template to "
                "a template that does, or remove the column"
            )

    def render(self, count: int, *, prompts: bool = False) -> str:
        """Render the first messages; up to the start of the assistant's turn if it prompts."""
        key = count, prompts
        if key not in self._rendered:
            shown = self.messages[:count]
            self._rendered[key] = render(self._tokenizer, shown, add_generation_prompt=prompts, tools=self._tools)
        return self._rendered[key]

    def _with_answer(self, count: int) -> str:
        """Render the first messages and a turn of the assistant, with `POLICY_MARK` in place of its text."""
        shown = [*self.messages[:count], {"role": "assistant", "content": POLICY_MARK}]
        return render(self._tokenizer, shown, add_generation_prompt=False, tools=self._tools)

    def unmarked(self, wanted: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """Return the text, and the part of it that each wanted message adds to its prompt."""
        text = self.render(len(self.messages))
        return text, {index: [self._added(text, index)] for index in wanted}

    def _added(self, text: str, index: int) -> Span:
        """Return the part of the text that a message of the assistant adds to its prompt.

        Raises:
            DataError: If the template rewrites the turn once others follow, or does not keep its prompt.
        """
        turn = self.render(index + 1)
        start = self._start(turn, index)
        said = turn if text.startswith(turn) else turn[:start] + self.ends.without(turn[start:])
        if not text.startswith(said):
            raise DataError(
                f"the chat template rewrites earlier turns, so the model would learn message {index} (from 0) of the "
                f"assistant in a form that differs from what it writes; {self._remedy(index)}, or set "
                "policy.tokenizer.chat_template to a template that does not change earlier turns"
            )
        return start, len(said)

    def end_of_open_turn(self) -> str:
        """Return the token that the template writes after the last message if another message follows (`<|user|>` for
        GLM); the end of sequence if it writes none."""
        calls = self.messages[-1].get("tool_calls")
        said: Message = {"role": "assistant", "content": "x", **({"tool_calls": calls} if calls else {})}
        answer: Message = {"role": "user", "content": "x"}
        if calls:
            answer = {"role": "tool", "content": "x", "name": "x", "tool_call_id": calls[0].get("id", "")}
        try:
            turn, longer = (
                render(self._tokenizer, messages, add_generation_prompt=False, tools=self._tools)
                for messages in ([_ASKED, said], [_ASKED, said, answer])
            )
        except TemplateError:
            return self.ends.turn[0]
        return beginning(longer[len(turn.rstrip()) :].lstrip(), self.ends.turn) or self.ends.turn[0]

    def _remedy(self, index: int) -> str:
        """Return the way to learn a turn that later messages change."""
        if any(message["role"] == "assistant" for message in self.messages[index + 1 :]):
            return "train on the last turn only (sft.learn: last, or `train: false` in this message)"
        return "remove the messages after it, so that the row ends with the trained message"

    def _start(self, turn: str, index: int) -> int:
        """Return where a turn begins after its prompt, in the rendered turn."""
        prompt = self._prompt(index)
        if turn.startswith(prompt):
            self._check_header(turn[len(prompt) :], index)
            return len(prompt)
        # a prompt may open a thought that the template leaves out of the turn: the turn begins where they part
        before = self.render(index) if index else ""
        shown = self._with_answer(index)
        shared = _shared(prompt, shown)
        start = _past(turn, shared, prompt[shared:])
        if shared < len(before) or not turn.startswith(prompt[:shared]):
            raise DataError(
                f"the chat template renders the messages before message {index} differently once the assistant has "
                "answered, so its turn cannot be identified; set policy.tokenizer.chat_template to a template that "
                "does not change them, or that marks the turn with {% generation %}"
            )
        return start

    def _check_header(self, turn: str, index: int) -> None:
        """Raise a `DataError` if a turn begins with a header that its prompt should have."""
        header = _unprompted(self._tokenizer, self._template)
        if header and turn.startswith(header):
            raise DataError(
                f"the chat template writes {header!r} before message {index} (from 0), but not with "
                "`add_generation_prompt`, so it is missing from the prompt in generation; set "
                "policy.tokenizer.chat_template to a template that ends with {% if add_generation_prompt %}{{ "
                f"{header!r}"
                " }}{% endif %}"
            )

    def _prompt(self, index: int) -> str:
        """Render the conversation up to the start of a turn, which may be the first message."""
        if index:
            return self.render(index, prompts=True)
        shown = self._with_answer(0)
        header = _header(self._tokenizer, self._template)
        opening = shown.partition(POLICY_MARK)[0]
        start = opening.rfind(header) + len(header) if header and header in opening else len(opening)
        return opening[:start]

    def marked(self, wanted: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """Return the text, and the marked parts of each wanted message.

        Raises:
            DataError: If a message has no marked part, or a part covers another message.
        """
        text, spans = render_marked(self._tokenizer, self.messages, self._tools)
        if not spans:  # The marks are in a comment or in an unused part of the template.
            return self.unmarked(wanted)
        of_message = self._by_message(spans)
        found = {index: [self._behind_prompt(text, span, index) for span in of_message[index]] for index in wanted}
        for index, several in found.items():
            if not several:
                raise DataError(
                    f"the chat template does not mark any part of message {index} (from 0) with {{% generation %}}; "
                    "set policy.tokenizer.chat_template to a template that marks each assistant turn, or set "
                    "`train: false` in this message"
                )
        return text, found

    def _by_message(self, spans: Sequence[Span]) -> dict[int, list[Span]]:
        """Return the marked parts by the message of the assistant that adds them."""
        speaks = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(spans) == len(speaks):
            return {index: [span] for index, span in zip(speaks, spans, strict=True)}
        # A message may have several parts, or none: it has those that it adds to the parts before it.
        counts = [self._num_marked(count) for index in speaks for count in (index, index + 1)]
        before, after = counts[::2], counts[1::2]
        if before != [0, *after[:-1]] or after[-1] != len(spans):
            raise DataError(
                f"the chat template marks {len(spans)} parts with {{% generation %}} for {len(speaks)} assistant "
                "messages, so they cannot be matched; set policy.tokenizer.chat_template to a template that marks each "
                "message with its own blocks"
            )
        return {index: list(spans[start:end]) for index, start, end in zip(speaks, before, after, strict=True)}

    def _num_marked(self, count: int) -> int:
        return len(render_marked(self._tokenizer, self.messages[:count], self._tools)[1]) if count else 0

    def _behind_prompt(self, text: str, span: Span, index: int) -> Span:
        """Return a marked part without the prompt of its turn, which a block may include."""
        start, end = span
        before = self.render(index) if index else ""
        if text.startswith(before) and start < len(before):
            raise DataError(
                f"the chat template's {{% generation %}} block for message {index} includes messages before it; set "
                "policy.tokenizer.chat_template to a template that marks only what the assistant says"
            )
        prompt = self._prompt(index)
        if not text.startswith(prompt):  # it may open a thought that the template leaves out of the turn
            prompt = prompt[: _shared(prompt, self._with_answer(index))]
        if text.startswith(prompt):
            start = max(start, len(prompt))
        return start, max(start, end)


@lru_cache(maxsize=8)
def _header(tokenizer: Tokenizer, template: str) -> str:
    """Return the beginning of a turn of the assistant, such as `<|im_start|>assistant`; empty if the template writes
    none."""
    try:
        shown = render(tokenizer, [_ASKED], add_generation_prompt=False)
        prompt = render(tokenizer, [_ASKED], add_generation_prompt=True)
    except TemplateError:
        return ""
    return prompt.removeprefix(shown) if prompt.startswith(shown) else ""


@lru_cache(maxsize=8)
def _unprompted(tokenizer: Tokenizer, template: str) -> str:
    """Return the text before the assistant's, except a thought, if the template writes no generation prompt."""
    try:
        before = render(tokenizer, [_ASKED], add_generation_prompt=False)
        prompt = render(tokenizer, [_ASKED], add_generation_prompt=True)
        turn = render(tokenizer, [_ASKED, {"role": "assistant", "content": OTHER_MARK}], add_generation_prompt=False)
    except TemplateError:
        return ""
    if prompt != before or not turn.startswith(before):
        return ""
    header, _, _ = turn[len(before) :].partition(OTHER_MARK)
    said = header.replace("<think>", "").replace("</think>", "").strip()
    return header if said else ""


def _past(turn: str, start: int, opened: str) -> int:
    """Return the position in a turn behind a thought that its prompt opens, if the turn has the same at this position
    but for white space; otherwise the position itself."""
    at = start
    for character in "".join(opened.split()):
        at += len(turn[at:]) - len(turn[at:].lstrip())
        if turn[at : at + 1] != character:
            return start
        at += 1
    return at


def _shared(first: str, second: str) -> int:
    """Return the length of the common beginning of two strings."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass(frozen=True)
class TurnClosing:
    """Finds the end of a turn.

    Args:
        turn: Tokens that end the policy's turn, the end of sequence first.
        special: All special tokens, the longest first, if the template does not show which of them ends a turn;
            otherwise none.
    """

    turn: tuple[str, ...]
    special: tuple[str, ...]

    def closed(self, text: str, span: Span) -> tuple[Span, str]:
        """Return a span up to the token that ends its turn, and that token; it is empty if there is none.

        Whatever a template writes after the token is left out.
        """
        start, end = span
        end = start + len(self.without(text[start:end]))
        rest = text[end:]
        gap = len(rest) - len(rest.lstrip())
        if follows := beginning(rest[gap:], self.turn):
            return (start, end + gap + len(follows)), follows
        said = text[start:end].rstrip()
        if inside := next((token for token in self.special if said.endswith(token)), ""):
            return (start, start + len(said)), inside
        if follows := beginning(rest, self.special):
            return (start, end + len(follows)), follows
        return span, ""

    def without(self, turn: str) -> str:
        """Return a turn without the token that ends it, and without what follows that."""
        found = [turn.index(end) for end in self.turn if end in turn]
        return turn[: min(found)] if found else turn


@lru_cache(maxsize=8)
def ends_of(tokenizer: Tokenizer, template: str) -> TurnClosing:
    """Return how turns of a tokenizer with a chat template end."""
    found = find_turn_ends(tokenizer, format_of(template).ends)
    turn = tuple(str(token) for token in tokenizer.convert_ids_to_tokens(list(found.sampled)))
    if len(turn) > 1 or turn[0] in template:
        return TurnClosing(turn, ())
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return TurnClosing(turn, tuple(sorted(special, key=len, reverse=True)))


def beginning(text: str, tokens: Sequence[str]) -> str:
    """Return the token at the start of a string; empty if there is none."""
    return next((token for token in tokens if text.startswith(token)), "")
