"""A turn's text without its tool calls, the search for calls, and calls of JSON values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.model_json import MalformedJson, after_space, read_model_json, read_model_json_at
from rl_core.rollouts.thoughts import THOUGHTS

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of tools, by tool."""

MAX_CALLS = 128
"""Maximum number of calls of a turn that are read."""

TOOL_NAME = re.compile(r"[\w.\-:/]{1,128}")
"""Names of tools. An observation shows the name, so one that a model makes up must not hold text or marks."""

_THOUGHTS = re.compile("|".join(map(re.escape, THOUGHTS)))


class Parsed(NamedTuple):
    """A turn as a parser read it.

    Attributes:
        content: The text without calls.
        calls: Calls in order; one that cannot be read has an `error`.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()


class Parser(Protocol):
    """Reads the turns of a format. It raises nothing and takes linear time for every text."""

    def __call__(self, text: str, schemas: Schemas, opened: str = "", /) -> Parsed:
        """Return the turn.

        Args:
            text: With special tokens.
            schemas: Of the tools that the policy may call.
            opened: Mark of `THOUGHTS` at the end of the prompt; empty without one.
        """


class BrokenCall(Exception):
    """A call that cannot be read. The parser answers it with a `ToolCall` that has an error.

    Args:
        problem: Reason, for the policy.
        end: End of the examined text; the search for the next call continues there.
        name: Name of the tool, if it is known.
        mention: True if the mark of the call may be only mentioned in a sentence.
    """

    def __init__(self, problem: str, end: int, *, name: str = "", mention: bool = False) -> None:
        super().__init__(problem)
        self.end = end
        self.name = name
        self.mention = mention


ReadCalls = Callable[[str, int], tuple[Sequence[ToolCall], int]]
"""Reads the calls after a mark: of the text and the position after the mark, the calls and the position after them.
Raises `BrokenCall`."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of the parameters of tools, as a prompt lists them."""
    shown = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in shown.items()}


def end_of_thoughts(text: str) -> int:
    """Return the position after the thoughts that a turn begins with, if it has their opening mark.

    Thoughts that are not closed are the whole turn. Their marks anywhere else are plain text.
    """
    end = 0
    while opened := _THOUGHTS.match(text, after_space(text, end)):
        close = THOUGHTS[opened[0]]
        at = text.find(close, opened.end())
        if at < 0:
            return len(text)
        end = at + len(close)
    return end


def marked_calls(text: str, mark: str, read: ReadCalls, opened: str = "") -> tuple[int, list[ToolCall]]:
    """Return the position of the first call of a turn, and all calls; none is made in thoughts.

    A mark without a readable call is a broken call, unless it is only mentioned: the text after it does not begin as a
    call does, nothing closes it, and the turn does not begin with it.

    Args:
        text: The turn.
        mark: Text before each call.
        read: Reads the calls after a mark.
        opened: Mark that has opened thoughts in the prompt. They end at its closing mark, unless that is in a call;
            without one there are no thoughts.
    """
    begin, close = end_of_thoughts(text), THOUGHTS.get(opened, "")
    close_at = text.find(close, begin) if close else -1
    first, calls = len(text), list[ToolCall]()
    at = text.find(mark, begin)
    while at >= 0 and (len(calls) <= MAX_CALLS or close_at >= 0):
        if 0 <= close_at < at:  # The calls so far were thoughts.
            begin, close_at = close_at + len(close), -1
            first, calls = len(text), []
        found: Sequence[ToolCall]
        try:
            found, end = read(text, at + len(mark))
            close_at = text.find(close, end) if at < close_at < end else close_at
        except BrokenCall as broken:
            mentioned = broken.mention and at > after_space(text, begin)
            found = () if mentioned else (malformed(str(broken), broken.name),)
            end = close_at if at < close_at < broken.end else broken.end
        first = at if found and not calls else first
        calls.extend(found)
        at = text.find(mark, end)
    return (first, at_most(calls)) if close_at < 0 else (len(text), [])


def at_most(calls: list[ToolCall]) -> list[ToolCall]:
    """Return the first `MAX_CALLS` calls, and an error instead of all others."""
    if len(calls) <= MAX_CALLS:
        return calls
    return [
        *calls[:MAX_CALLS],
        malformed(f"a turn may have {MAX_CALLS} calls; this one and those after it are not made"),
    ]


def malformed(error: str, name: str = "") -> ToolCall:
    """Return a call that cannot be made, with the name of its tool if that can be one."""
    return ToolCall(name if TOOL_NAME.fullmatch(name) else "", {}, error=error)


def object_call(found: Any, key: str, schemas: Schemas) -> ToolCall:
    """Return the call of a JSON object with a name and arguments.

    An object with any other key is malformed, because its arguments would be lost. The keys `id`, and `type` with the
    value "function", are ignored. Arguments may be an object, or a string with the JSON of one.

    Args:
        found: A JSON value.
        key: Key of the arguments.
        schemas: Schemas of the tools.
    """
    expected = f"it must be a JSON object with a text `name` and an object `{key}`"
    if not isinstance(found, dict):
        return malformed(expected)
    name = found.get("name")
    if not isinstance(name, str):
        return malformed(f"{expected}; its keys are {_shown_keys(found)}")
    known = {"name", key, "id", *(["type"] if found.get("type") == "function" else [])}
    if extra := [each for each in found if each not in known]:
        problem = f"it has {_shown_keys(extra)}; a call has `name` and `{key}`, and all arguments are in `{key}`"
        return malformed(problem, name)
    if key not in found:
        return without_arguments(name, schemas, f"`{key}`")
    given = found[key]
    if isinstance(given, str):
        try:
            given = read_model_json(given)
        except MalformedJson as error:
            return malformed(f"`{key}` must be a JSON object: {error}", name)
    return named_call(name, given, f"`{key}`")


def named_call(name: str, given: Any, what: str = "the arguments") -> ToolCall:
    """Return the call of a tool.

    Args:
        name: As the policy wrote it.
        given: Its arguments; malformed unless they are an object.
        what: Words for the arguments.
    """
    if not TOOL_NAME.fullmatch(name):
        return malformed("the name of a tool has letters, digits and `_-.:/`, 128 of them at most")
    return ToolCall(name, given) if isinstance(given, dict) else malformed(f"{what} must be a JSON object", name)


def without_arguments(name: str, schemas: Schemas, what: str = "arguments") -> ToolCall:
    """Return the call of a tool without arguments, which is malformed if the tool requires some."""
    required = schemas.get(name, {}).get("required")
    if not isinstance(required, list | tuple) or not required:
        return named_call(name, {})
    return malformed(f"it has no {what}; {name} requires {', '.join(map(str, required))}", name)


def object_before(text: str, start: int, *marks: str, name: str = "") -> tuple[Any, int]:
    """Return the JSON object or list at a position, and the position after the marks that must follow it.

    The value ends where its brackets close, so its strings may have any mark.

    Args:
        text: The turn.
        start: Position of the value or of white space before it.
        marks: Texts that must follow, with white space between them.
        name: Name of the tool, for the error.

    Raises:
        BrokenCall: If there is no such value or no such mark.
    """
    start = after_space(text, start)
    if text[start : start + 1] not in ("{", "["):
        got = f"got {text[start : start + 20]!r}" if start < len(text) else "got nothing"
        raise BrokenCall(f"it is not valid JSON: it must be a JSON object, {got}", start, name=name)
    try:
        value, end = read_model_json_at(text, start)
    except MalformedJson as error:
        raise BrokenCall(str(error), error.end, name=name) from None
    for mark in marks:
        end = after_space(text, end)
        if end == len(text):
            raise BrokenCall(f"it is not closed by {mark}", end, name=name)
        if not text.startswith(mark, end):
            raise BrokenCall(f"{mark} must follow its JSON, got {text[end : end + 20]!r}", end, name=name)
        end += len(mark)
    return value, end


def _shown_keys(keys: Any) -> str:
    shown = [f"`{key[:40]}`" for key in list(keys)[:4]]
    return "no keys" if not shown else ", ".join(shown) + (" and others" if len(keys) > 4 else "")
