"""A turn's text apart from its tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.environment import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of tools, by the names of the tools."""


@dataclass(frozen=True)
class Parsed:
    """A turn as a parser read it.

    Args:
        content: the text without calls.
        calls: in order; one that cannot be read has an `error`.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of the parameters of tools, as a prompt lists them."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}


def behind_thoughts(text: str) -> tuple[str, str]:
    """The thoughts that a turn begins with, and the rest; calls within thoughts are not made."""
    thoughts, closed, rest = text.rpartition("</think>")
    if closed:
        return thoughts + closed, rest
    return (text, "") if "<think>" in text else ("", text)


def read_call(text: str, *, arguments: str = "arguments") -> ToolCall:
    """The call of a JSON object with `name` and arguments.

    Args:
        arguments: the key of its arguments.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        return malformed(f"it is not valid JSON: {error}")
    return call_of(found, arguments=arguments)


def call_of(found: Any, *, arguments: str = "arguments") -> ToolCall:
    """The call of a JSON value, as `read_call`."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return malformed(f"it must be a JSON object with a text `name` and an object `{arguments}`")
    given = found.get(arguments, {})
    if not isinstance(given, dict):
        return malformed(f"`{arguments}` must be a JSON object", found["name"])
    return ToolCall(found["name"], given)


def named_call(name: str, text: str) -> ToolCall:
    """The call of a tool with the JSON text of its arguments."""
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        return malformed(f"the arguments are not valid JSON: {error}", name)
    return ToolCall(name, given) if isinstance(given, dict) else malformed("the arguments must be a JSON object", name)


def malformed(error: str, name: str = "") -> ToolCall:
    """A call that cannot be made."""
    return ToolCall(name, {}, error=error)


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """An argument that was written without quotes: as it is for a text, and otherwise the JSON value, if it is one."""
    kinds = {each.get("type") for each in (schema, *schema.get("anyOf", ()))} - {None}
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
