"""A turn's text apart from its tool calls, and how a turn is searched for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.model_json import after_space
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.thoughts import THOUGHTS

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of tools, by the names of the tools."""

MAX_CALLS = 128
"""Maximum number of calls of a turn that are read."""

TOOL_NAME = re.compile(r"[\w.\-:/]{1,128}")
"""Names of tools. An observation shows the name, so one that a model makes up must not hold text or marks."""

_THOUGHTS = re.compile("|".join(map(re.escape, THOUGHTS)))


@dataclass(frozen=True)
class Parsed:
    """A turn as a parser read it.

    Args:
        content: The text without calls.
        calls: Calls in order; one that cannot be read has an `error`.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()


class Parser(Protocol):
    """Reads the turns of a format. It raises nothing and takes linear time, whatever the text."""

    def __call__(self, text: str, schemas: Schemas, opened: str = "", /) -> Parsed:
        """Return the turn.

        Args:
            text: With special tokens.
            schemas: Of the tools that the policy may call.
            opened: Mark of `THOUGHTS` with which the prompt ends; empty without one.
        """
        ...


class BrokenCall(Exception):
    """A call that cannot be read. The parser answers it with a `ToolCall` that has an error.

    Args:
        problem: Reason, for the policy.
        end: Position up to which the text was examined; the search for the next call continues there.
        name: Name of the tool, if it is known.
        mention: Whether the mark of the call may as well be mentioned in a sentence.
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
    """Return the position after the thoughts that a turn begins with, of which it has the opening mark.

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

    A mark from which no call can be read is a broken call, unless it is only mentioned: what follows it does not begin
    as a call does, nothing closes it, and the turn does not begin with it.

    Args:
        text: The turn.
        mark: Text before each call.
        read: Reads what follows a mark.
        opened: Mark with which the prompt has opened thoughts. They end at its closing mark, unless that is in a call;
            without one there are no thoughts.
    """
    begin, close = end_of_thoughts(text), THOUGHTS.get(opened, "")
    close_at = text.find(close, begin) if close else -1
    first, calls = len(text), list[ToolCall]()
    at = text.find(mark, begin)
    while at >= 0 and (len(calls) <= MAX_CALLS or close_at >= 0):
        if 0 <= close_at < at:  # the calls so far were thoughts
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
