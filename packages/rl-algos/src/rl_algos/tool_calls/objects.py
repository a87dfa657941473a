"""Tool calls of JSON values: their name and arguments, or the reason that they have none."""

from __future__ import annotations

from typing import Any

from rl_algos.tool_calls.parsed import TOOL_NAME, BrokenCall, Schemas, malformed
from rl_core.model_json import MalformedJson, after_space, read_model_json, read_model_json_at
from rl_core.rollouts.environment import ToolCall

_MISSING = object()


def object_call(found: Any, key: str, schemas: Schemas) -> ToolCall:
    """Return the call of a JSON object with a name and arguments.

    An object with any other key is malformed, because arguments that stand there would be lost; `id`, and a `type` that
    is "function", say nothing about the call. Arguments may be an object, or a string with the JSON of one.

    Args:
        found: A JSON value.
        key: Key of the arguments.
        schemas: Of the tools.
    """
    expected = f"it must be a JSON object with a text `name` and an object `{key}`"
    if not isinstance(found, dict):
        return malformed(expected)
    name = found.get("name")
    if not isinstance(name, str):
        return malformed(f"{expected}; its keys are {_listed(found)}")
    known = {"name", key, "id", *(["type"] if found.get("type") == "function" else [])}
    if extra := [each for each in found if each not in known]:
        problem = f"it has {_listed(extra)}; a call has `name` and `{key}`, and all arguments are in `{key}`"
        return malformed(problem, name)
    given = found.get(key, _MISSING)
    if given is _MISSING:
        return without_arguments(name, schemas, f"`{key}`")
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


def _listed(keys: Any) -> str:
    shown = [f"`{key[:40]}`" for key in list(keys)[:4]]
    return "no keys" if not shown else ", ".join(shown) + (" and others" if len(keys) > 4 else "")
