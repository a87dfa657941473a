"""Chat messages and tools as data has them, in the one form that the rest of the code reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import THOUGHT_KEYS

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Usual roles. A chat template may know others."""

_ROLE_NAMES = {
    "human": "user",
    "prompter": "user",
    **dict.fromkeys(("model", "gpt", "ai", "bot", "chatbot"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "tool_result"), "tool"),
}
"""Roles under the names of other formats: ShareGPT, Gemini, older versions of OpenAI's API, ms-swift."""
_CALLS = ("function_call", "tool_call")
"""Roles of messages whose content is one or more calls of the assistant."""
_ONLY_CALLS = "only calls"
"""Key of a message that had one of the roles `_CALLS`, while a conversation is read."""
_IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes", "base64")
"""Keys of the image in parts of the type `image`, `image_url` or `input_image`."""
_VIDEO_KEYS = ("video", "video_url", "url", "path", "bytes")
"""Keys of the video in parts of the type `video` or `video_url`."""


def conversation(value: Any, *, role: str = "user") -> tuple[Message, ...]:
    """Read a conversation: a list of messages, the same as JSON text, or one message as plain text.

    Args:
        value: Value of a column: list of messages, single message, or string.
        role: Role of plain text.

    Raises:
        DataError: If it is anything else.
    """
    if isinstance(value, str):
        listed = _listed(value)
        return ({"role": role, "content": value},) if listed is None else as_messages(listed)
    return as_messages([value] if isinstance(value, Mapping) else value)


def is_plain_text(value: Any) -> bool:
    """Return whether `conversation` reads a value as one message of plain text."""
    return isinstance(value, str) and _listed(value) is None


def as_messages(value: Any) -> tuple[Message, ...]:
    """Read a list of chat messages. Text parts of a content are joined, unless it has images, which become parts
    `{"type": "image", "image": SOURCE}` (without `image` if a column has them), or videos, which become parts
    `{"type": "video", "video": SOURCE}`. The arguments of tool calls become
    objects, and keys without a value are left out.

    Raises:
        DataError: If it is anything else.
    """
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"expected a string or a list of messages, got {shown(value)}")
    messages: list[Message] = []
    for message in map(_message, value):
        if _ONLY_CALLS in message and messages and messages[-1].get("tool_calls"):
            # A message with only calls belongs to the turn before it.
            calls = [*messages[-1]["tool_calls"], *message["tool_calls"]]
            messages[-1] = {**messages[-1], "tool_calls": calls}
        else:
            messages.append({key: item for key, item in message.items() if key != _ONLY_CALLS})
    return tuple(messages)


def as_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Read the tools of a row: a list of JSON schemas as OpenAI's API takes them, or only their functions, or JSON
    text of either.

    Raises:
        DataError: If it is anything else.
    """
    if value is None or value == "":
        return ()
    tools = _json_of(value, "tools") if isinstance(value, str) else value
    if not isinstance(tools, list | tuple):
        raise DataError(f"the column `tools` must hold a list of tools, got {shown(value)}")
    found = []
    for tool in tools:
        wrapped = tool if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) else None
        function = wrapped["function"] if wrapped else tool
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise DataError(f"a tool must be {form}, got {shown(tool)}")
        found.append({"type": "function", **(wrapped or {}), "function": dict(function)})
    return tuple(found)


def shown(value: Any) -> str:
    """Return a value for a message, cut off if it is long."""
    return json.dumps(value, default=str)[:80]


def _listed(text: str) -> list[Any] | None:
    """Return the messages of a JSON string; None for any other string."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or not found:
        return None
    are_messages = all(isinstance(each, Mapping) and {"role", "from"} & each.keys() for each in found)
    return found if are_messages else None


def _message(message: Any) -> Message:
    given = _named_as_openai(message) if isinstance(message, Mapping) else {}
    if not isinstance(given.get("role"), str):
        raise DataError(f"a message needs a `role` and a `content`, got {shown(message)}")
    role = given["role"]
    meant = role.strip().lower()
    if role not in (*ROLES, *_ROLE_NAMES, *_CALLS) and meant in (*ROLES, *_ROLE_NAMES):
        raise DataError(f"{role!r} is not a role; write it as {_ROLE_NAMES.get(meant, meant)!r}")
    # Columnar files fill keys that a message does not have with null.
    plain = {key: item for key, item in given.items() if item is not None}
    if role in _CALLS:
        content = plain.get("content")
        found = _json_of(content, "content") if isinstance(content, str) else content
        listed = [found] if isinstance(found, Mapping) else found
        plain = {**plain, "content": "", "tool_calls": listed, _ONLY_CALLS: True}
    role = plain["role"] = "assistant" if role in _CALLS else _ROLE_NAMES.get(role, role)
    # Older versions of OpenAI's API have one call under another name.
    older = plain.pop("function_call", None)
    if older and plain.get("tool_calls"):
        raise DataError("a message has both `function_call` and `tool_calls`; remove one")
    calls = _calls([older]) if older else _calls(plain.pop("tool_calls", ()))
    if calls:
        plain["tool_calls"] = calls
    content = _content(plain.get("content"), role)
    if content is None and role == "assistant" and isinstance(plain.get("refusal"), str):
        content = plain.pop("refusal")
    is_silent = role != "assistant" or not (calls or any(isinstance(plain.get(key), str) for key in THOUGHT_KEYS))
    if content is None and is_silent:
        raise DataError(f"the {role} message has no `content`: {shown(message)}")
    return {**plain, "content": content or ""}


def _named_as_openai(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of ShareGPT (`from`, `value`) or Gemini (`parts`) with a `role` and a `content`."""
    if "role" not in message and {"from", "value"} <= message.keys():
        rest = {key: item for key, item in message.items() if key not in ("from", "value")}
        return {"role": message["from"], "content": message["value"], **rest}
    if "content" in message or not isinstance(message.get("parts"), list | tuple):
        return message
    rest = {key: item for key, item in message.items() if key != "parts"}
    calls: list[Any] = []
    results: list[Any] = []
    others: list[Any] = []
    for part in message["parts"]:
        kept = {key: item for key, item in part.items() if item is not None} if isinstance(part, Mapping) else part
        keys = set(kept) if isinstance(kept, Mapping) else set()
        if keys == {"functionCall"}:
            call = kept["functionCall"]
            is_call = isinstance(call, Mapping)
            calls.append({"name": call.get("name"), "arguments": call.get("args") or {}} if is_call else call)
        elif keys == {"functionResponse"}:
            results.append(kept["functionResponse"])
        else:
            others.append(kept)
    if results and (len(results) > 1 or others or calls):
        raise DataError(f"a message with a `functionResponse` must have no other part: {shown(message)}")
    if results:
        result = results[0] if isinstance(results[0], Mapping) else {}
        return {**rest, "role": "tool", "name": result.get("name"), "content": json.dumps(result.get("response"))}
    return {**rest, "content": others, **({"tool_calls": calls} if calls else {})}


def _content(content: Any, role: str) -> str | tuple[Mapping[str, Any], ...] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise DataError(f"the {role} message's `content` must be a string, got {content!r}")
    parts = [_part(part, role) for part in content]
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return joined_parts(parts)


def joined_parts(parts: Iterable[str | Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return strings and parts as parts of a content, with neighbouring strings joined and without empty ones."""
    joined: list[Mapping[str, Any]] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if not is_text:
            joined += [part for part in run if isinstance(part, Mapping)]
        elif text := "".join(map(str, run)):
            joined.append({"type": "text", "text": text})
    return tuple(joined)


def _part(part: Any, role: str) -> str | Mapping[str, Any]:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, Mapping) and kind in ("video", "video_url"):
        found = _sources(part, _VIDEO_KEYS, role, "a video")
        if not found:
            raise DataError(f"the {role} message has a part of type {kind!r} without a `video`: {shown(part)}")
        return {"type": "video", "video": found[0][1]}
    if isinstance(part, Mapping) and kind in ("image", "image_url", "input_image"):
        found = _sources(part, _IMAGE_KEYS, role, "an image")
        if not found:
            return {"type": "image"}
        [(key, source)] = found
        is_base64 = key == "base64" and isinstance(source, str)
        return {"type": "image", "image": f"data:;base64,{source}" if is_base64 else source}
    allowed = "only parts of type 'text' with a `text`, images and videos can be read"
    raise DataError(f"the {role} message has a part of type {kind!r}; {allowed}: {shown(part)}")


def _sources(part: Mapping[str, Any], keys: Iterable[str], role: str, kind: str) -> list[tuple[str, Any]]:
    """Return the key and value of the image or video of a part; none if it has none."""
    found = [(key, part[key]) for key in keys if part.get(key) is not None]
    if len(found) > 1:
        both = "` and `".join(key for key, _ in found)
        raise DataError(f"the {role} message has {kind} with both `{both}`; keep one")
    return found


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form, with their arguments as objects."""
    if isinstance(calls, str) and not calls.strip():
        return []
    if isinstance(calls, str):
        calls = _json_of(calls, "tool_calls")
    if not isinstance(calls, list | tuple):
        raise DataError(f"`tool_calls` must be a list, got {shown(calls)}")
    found = []
    for call in calls:
        plain = {key: item for key, item in call.items() if item is not None} if isinstance(call, Mapping) else {}
        function = plain.get("function", plain)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"a tool call needs a `function` with a `name` and `arguments`, got {shown(call)}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json_of(arguments, "arguments") if arguments.strip() else {}
        if not isinstance(arguments, Mapping | None):
            name = function["name"]
            raise DataError(f"the `arguments` of the tool call {name!r} must be an object, got {shown(call)}")
        named = {**function, "arguments": dict(arguments or {})}
        found.append({**plain, "function": named} if "function" in plain else {"type": "function", "function": named})
    return found


def _json_of(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{name}` is not valid JSON ({error}): {shown(text)}") from None


def refuse_surrogates(value: Any, name: str = "the row") -> None:
    """Raise a `DataError` if a string anywhere in a value has half of a surrogate pair, which no tokenizer takes."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            problem = f"{name} has half of a surrogate pair ({value[:60]!a}), which is not valid Unicode"
            raise DataError(f"{problem}; write the character as a whole, or remove it")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            refuse_surrogates(key, "the name of a field")
            refuse_surrogates(item, f"`{key}`" if name == "the row" else name)
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_surrogates(item, name)


def without_nulls(value: Any) -> Any:
    """Leave out keys without a value at any depth: columnar files fill every field that another row has with null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
