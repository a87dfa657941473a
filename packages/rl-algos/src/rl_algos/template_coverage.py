"""Proof that a chat template shows every piece of a conversation.

Every piece of a message (its text, each call with each argument, a result, a name) is replaced by a mark that occurs
nowhere else, and the conversation is rendered once. A piece whose mark is missing is tried again alone, in the row
itself: if the rendered text stays the same, the template does not show it. So no case needs a rule. Conversations of
the same structure share the first rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateError

from rl_algos.images.image_tokens import texts_of
from rl_algos.tokenizer import render, squeezed
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import THOUGHT_KEYS, THOUGHTS

_SHOWN_KEYS = (
    *("refusal", "reasoning_details", "reasoning_text", "thoughts", "thought", "tool_plan", "analysis"),
    *("images", "image", "image_url", "videos", "video", "audios", "audio", "files", "attachments", "documents"),
)
"""Further keys of other formats for parts of a message that are read or shown."""

_THOUGHT_FIRST = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_TAG = re.compile(r"</?[a-z_]+>")
_ANY_KEY = {"key": {"type": "string", "description": "A key."}}
_ANY_PARAMETERS = {"type": "object", "properties": _ANY_KEY, "required": ["key"]}
_ANY_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "lookup", "description": "Looks up.", "parameters": _ANY_PARAMETERS},
}
"""Replaces the tools of a row, which do not change how a template shows messages."""

Kind = Literal["said", "thoughts", "call", "name", "link"]
"""Kind of a piece. Thoughts of turns that are not learned may be left out, as templates of models that think do. Links
between calls and results (`id`, `tool_call_id`, the name of a tool) may be left out, because the order shows them."""


@dataclass(frozen=True)
class _Piece:
    """A piece of a conversation.

    Args:
        index: Index of its message.
        kind: See `Kind`.
        what: Name of the piece, for messages.
        value: Value that the row has.
    """

    index: int
    kind: Kind
    what: str
    value: Any


class Coverage:
    """Checks that a chat template shows a conversation.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages as they are rendered.
        text: The rendered conversation.
        tools: JSON schemas of the tools that the assistant may call.
        prompts: True if the text ends with the start of a turn of the assistant.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        text: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompts: bool = False,
    ) -> None:
        self._tokenizer, self._messages, self._text = tokenizer, messages, text
        self._tools, self._prompts = tools, prompts
        self._template = str(tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None))
        walk = _Walk(lambda number, _value: _mark(number), self._template)
        structure = json.dumps(walk.messages(messages), default=str)
        self._pieces = walk.pieces
        found = _rendered_structure(tokenizer, self._template, structure, bool(tools), prompts)
        self._is_refused = found is None
        self._shown, self._unfilled = found or (frozenset(), None)

    def check_links(self) -> None:
        """Raise a `DataError` if a call or a result lacks an id that the template writes, or if only ids that it does
        not write show which call a result belongs to."""
        if self._is_refused:
            return
        if self._unfilled is not None:
            index, key = self._unfilled
            kind, whose = ("calls", "a tool call of ") if key == "id" else ("results", "")
            raise DataError(
                f"the chat template writes the `{key}` of tool {kind}, but {whose}message {index} (from 0) has none, "
                f"so an empty place would be read or learned; add `{key}` to the data"
            )
        shown = [self._pieces[number] for number in self._shown]
        _check_order(self._messages, {piece.index for piece in shown if piece.kind == "link"})

    def check_pieces(self, learned: Sequence[bool] = ()) -> None:
        """Raise a `DataError` if the template leaves out a piece of a message.

        Args:
            learned: True for each message that is learned; empty if none is.
        """
        for number, piece in enumerate(self._pieces):
            is_needed = piece.kind != "link" and (piece.kind != "thoughts" or (bool(learned) and learned[piece.index]))
            if is_needed and not self._is_shown(number) and not self._is_in_id(piece):
                raise _not_shown(piece, self._messages[piece.index], self._template)
        # Raise a `DataError` if the template cuts the result of a tool off, which no structure shows.
        shown = squeezed(self._text)
        for index, message in enumerate(self._messages):
            if message["role"] != "tool":
                continue
            for content in texts_of(message):
                forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
                if not any(squeezed(form) in shown for form in forms):
                    raise _not_shown(_Piece(index, "said", "the text", content), message, "")

    def _is_shown(self, number: int) -> bool:
        if number in self._shown:
            return True
        walk = _Walk(lambda at, value: _mark(at) if at == number else value, self._template, keeps_all=True)
        alone = walk.messages(self._messages)
        try:
            changed = render(self._tokenizer, alone, add_generation_prompt=self._prompts, tools=self._tools)
        except TemplateError:
            return True  # The template reads the piece.
        return changed != self._text

    def _is_in_id(self, piece: _Piece) -> bool:
        """Return whether the template shows a call by its id, as `functions.add:0` of Kimi."""
        ids = [n for n, each in enumerate(self._pieces) if each.index == piece.index and each.what == "id"]
        return any(str(piece.value) in self._pieces[number].value and self._is_shown(number) for number in ids)


def with_thoughts_read(tokenizer: Any, messages: Sequence[Message], template: str) -> list[Message]:
    """Return the messages with their thoughts under the key that the chat template reads, and only under that one.

    Thoughts in `<think>` tags of a content are moved there if the template has other marks of thoughts, as gpt-oss's.
    """
    found = []
    for message in messages:
        texts = {key: message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str)}
        given = {key: text for key, text in texts.items() if text.strip()}
        inside = None
        if not given and "</think>" not in template and message["role"] == "assistant":
            inside = _THOUGHT_FIRST.match(str(message.get("content")))
        key = thoughts_key(tokenizer, template) if given or inside else ""
        if key and inside:
            message = {**message, key: inside[1].strip(), "content": inside[2].lstrip()}
        elif key and len(set(given.values())) == 1:
            rest = {name: value for name, value in message.items() if name not in given}
            message = {**rest, key: next(iter(given.values()))}
        found.append(message)
    return found


@lru_cache(maxsize=8)
def thoughts_key(tokenizer: Any, template: str) -> str:
    """Return the key from which a chat template reads the thoughts of the last turn; empty if it reads none."""
    asked: Message = {"role": "user", "content": "x"}

    def shows(key: str) -> bool:
        try:
            said = {"role": "assistant", "content": "x", key: _mark(0)}
            return _mark(0) in render(tokenizer, [asked, said], add_generation_prompt=False)
        except TemplateError:
            return False

    return next((key for key in THOUGHT_KEYS if key in template and shows(key)), "")


def _mark(number: int) -> str:
    """Return a mark of nine letters and digits, which is also a valid id of a call."""
    return f"qz{number:06d}q"


class _Walk:
    """Goes through the pieces of a conversation in a fixed order.

    Args:
        replace: Function from the number of a piece and its value to its replacement.
        template: Chat template. It reads the keys of messages and the tags in contents that its text contains.
        keeps_all: True to keep the keys of messages that it does not read, and the sources of images.
    """

    def __init__(self, replace: Callable[[int, Any], Any], template: str, *, keeps_all: bool = False) -> None:
        self._replace = replace
        self._template = template
        self._keeps_all = keeps_all
        self.pieces: list[_Piece] = []

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation with its pieces replaced."""
        return [self._message(index, message) for index, message in enumerate(messages)]

    def _piece(self, index: int, kind: Kind, what: str, value: Any) -> Any:
        self.pieces.append(_Piece(index, kind, what, value))
        return self._replace(len(self.pieces) - 1, value)

    def _message(self, index: int, message: Message) -> Message:
        found: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content":
                found[key] = self._content(index, value)
            elif key == "tool_calls" and isinstance(value, list | tuple):
                found[key] = [self._call(index, number, call) for number, call in enumerate(value)]
            elif key in (*THOUGHT_KEYS, *_SHOWN_KEYS) and not isinstance(value, str):
                found[key] = self._piece(index, "said", f"`{key}`", value) if value else value
            elif key in THOUGHT_KEYS:
                found[key] = self._text(index, "thoughts", f"the thoughts (`{key}`)", value)
            elif key in _SHOWN_KEYS:
                found[key] = self._text(index, "said", f"`{key}`", value)
            elif key == "name" and isinstance(value, str):
                found[key] = self._text(index, "link" if message["role"] == "tool" else "name", "the `name`", value)
            elif key == "tool_call_id" and isinstance(value, str):
                found[key] = self._piece(index, "link", key, value)
            elif key == "role" or self._keeps_all or key in self._template:
                found[key] = value
        return found

    def _text(self, index: int, kind: Kind, what: str, value: str) -> str:
        return str(self._piece(index, kind, what, value)) if value.strip() else value

    def _content(self, index: int, content: Any) -> Any:
        if isinstance(content, str):
            return self._tagged(index, content)
        if not isinstance(content, list | tuple):
            return content
        parts: list[Any] = []
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "text":
                parts.append({**part, "text": self._tagged(index, part["text"])})
            else:  # Images are counted when they take their places.
                parts.append(part if self._keeps_all or not isinstance(part, Mapping) else {"type": part["type"]})
        return parts

    def _tagged(self, index: int, content: str) -> str:
        """Replace the text around tags, which templates look for in a content."""
        if "<" not in content:
            return self._text(index, "said", "the text", content)
        known = [match for match in _TAG.finditer(content) if match[0] in self._template]
        pieces, end, thinks = [], 0, False
        for match in [*known, None]:
            stop = len(content) if match is None else match.start()
            is_thought = thinks or (match is not None and match[0] in THOUGHTS.values())
            kind: Kind = "thoughts" if is_thought else "said"
            pieces.append(self._text(index, kind, "a part of the text", content[end:stop]))
            if match is not None:
                pieces.append(match[0])
                end, thinks = match.end(), match[0] in THOUGHTS
        return "".join(pieces)

    def _call(self, index: int, number: int, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        found = dict(call)
        if isinstance(call.get("id"), str):
            found["id"] = self._piece(index, "link", "id", call["id"])
        function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else found
        what = f"call {number} (from 0)"
        if isinstance(function.get("name"), str):
            function["name"] = self._piece(index, "call", what, function["name"])
        if "arguments" in function:
            function["arguments"] = self._value(index, f"the arguments of {what}", function["arguments"])
        return {**found, "function": function} if "function" in call else function

    def _value(self, index: int, what: str, value: Any) -> Any:
        """Replace the keys and values of arguments. Empty values are shown by their keys."""
        if isinstance(value, Mapping):
            return {
                self._piece(index, "call", what, key): self._value(index, what, item) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(index, what, item) for item in value]
        return self._piece(index, "call", what, value) if value else value


@lru_cache(maxsize=8192)
def _rendered_structure(
    tokenizer: Any, template: str, structure: str, has_tools: bool, prompts: bool
) -> tuple[frozenset[int], tuple[int, str] | None] | None:
    """Render a conversation with marks in the places of its texts; all with the same structure have this rendering.

    Returns:
        The numbers of the pieces that it shows, and the index of a message with the key whose absence leaves an empty
        place in the text, None if none does. None if the template refuses the marks.
    """
    marked: list[dict[str, Any]] = json.loads(structure)
    tools = [_ANY_TOOL] if has_tools else ()

    def rendered(messages: Sequence[Message]) -> str:
        return render(tokenizer, messages, add_generation_prompt=prompts, tools=tools)

    try:
        text = rendered(marked)
    except TemplateError:
        return None
    numbers = {int(number) for number in re.findall(r"qz(\d{6})q", text.lower())}
    return frozenset(numbers), _unfilled(marked, text, rendered)


def _unfilled(
    marked: list[dict[str, Any]], text: str, rendered: Callable[[Sequence[Message]], str]
) -> tuple[int, str] | None:
    """Return the first link that a message lacks and the template writes: the text is then the same but for an empty
    place."""
    mark = _mark(999_999)
    for index, message in enumerate(marked):
        for key, filled in _filled(message, mark):
            try:
                longer = rendered([*marked[:index], filled, *marked[index + 1 :]])
            except TemplateError:
                continue
            empty = (f'"{mark}"', mark, mark, mark)
            if longer != text and text in map(longer.replace, empty, ("null", "", "None", "null")):
                return index, key
    return None


def _filled(message: dict[str, Any], mark: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the message with each link that it lacks."""
    if message["role"] == "tool":
        return [(key, {**message, key: mark}) for key in ("tool_call_id", "name") if key not in message]
    calls = message.get("tool_calls") or []
    without = [number for number, call in enumerate(calls) if isinstance(call, dict) and "id" not in call]
    return [
        ("id", {**message, "tool_calls": [*calls[:number], {**calls[number], "id": mark}, *calls[number + 1 :]]})
        for number in without
    ]


def _check_order(messages: Sequence[Message], shown: Set[int]) -> None:
    """Raise a `DataError` if results are in another order than their calls, and the text does not match them.

    Args:
        messages: Messages of the conversation.
        shown: Indices of the results whose id or name the template shows.
    """
    calls: Sequence[Any] = ()
    latest = -1
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            calls, latest = message.get("tool_calls") or (), -1
            continue
        # The call of a result is found by its id, or by its name if only one call has that.
        ids = [call.get("id") for call in calls]
        names = [call.get("function", call).get("name") for call in calls]
        position = -1
        if message.get("tool_call_id") in ids:
            position = ids.index(message.get("tool_call_id"))
        elif names.count(message.get("name")) == 1:
            position = names.index(message.get("name"))
        if 0 <= position < latest and index not in shown:
            raise DataError(
                f"message {index} (from 0) is the result of call {position} (from 0), but comes after the result of a "
                "later call, and the chat template does not show which call a result belongs to; sort the results in "
                "the order of their calls"
            )
        latest = max(latest, position)


def _not_shown(piece: _Piece, message: Message, template: str) -> DataError:
    value = piece.value if isinstance(piece.value, str) else json.dumps(piece.value, default=str)
    key = next((key for key in THOUGHT_KEYS if key in template), "")
    reads = f" The template reads thoughts from `{key}`." if piece.kind == "thoughts" and key else ""
    return DataError(
        f"the chat template does not show {piece.what} of message {piece.index} (from 0), whose role is "
        f"{message['role']!r}: {value[:80]!r}; set policy.tokenizer.chat_template to a template that does, or remove "
        f"it from the data.{reads}"
    )
