"""Reading the fields of a request, with one clear error for each that cannot be served."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rl_algos.agents.calls import CallRefused, Tools
from rl_algos.data.row_images import RowImages
from rl_algos.data.rows.messages import joined_parts
from rl_core.images import ImageError, ImageStore
from rl_core.rollouts.program import AnswerForm, requested_schema
from rl_core.rollouts.rollout import Message

T = TypeVar("T")

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 256
"""Maximum number of stop strings of one call, and of characters of each: the engine searches every token for them."""

MAX_CHOICES = 16
"""Maximum number of completions of one call."""

_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
CHOSEN_BY_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed", *_PENALTIES)
"""Fields that set how tokens are drawn. The run decides that, so that training sees the distribution that was sampled
from; the fields are accepted and have no effect."""

Content = str | Sequence[Mapping[str, Any]]
"""Content of a message for chat templates: text, or parts that are text or images."""

_NO_DOWNLOADS = "the policy downloads nothing; read the image in the agent and send its bytes in base64"

_KINDS: Mapping[type, str] = {str: "a string", int: "an integer", bool: "a boolean", list: "a list", dict: "an object"}


class Fields:
    """The fields of a JSON object, each read once.

    Args:
        body: The object.
        at: Path of the object in the request; empty for the whole request.

    Attributes:
        raw: Returns a field as it is; None if it is absent.
    """

    def __init__(self, body: Any, at: str = "") -> None:
        if not isinstance(body, Mapping):
            raise CallRefused(f"{at or 'the request'} must be an object, got {_shown(body)}", param=at)
        self.raw = body.get
        self._at = f"{at}." if at else ""

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    def get(self, name: str, kind: type[T], default: T) -> T:
        """Return a field, or the default if it is absent or null.

        Raises:
            CallRefused: If it has another type.
        """
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refused(name, f"must be {_KINDS[kind]}, got {_shown(value)}")
        return value

    def required(self, name: str, kind: type[T]) -> T:
        """Return a field.

        Raises:
            CallRefused: If it is absent, or has another type.
        """
        if name not in self:
            raise self.refused(name, "is missing")
        return self.get(name, kind, kind())

    def section(self, name: str) -> Fields:
        """Return the fields of an object, which is empty if it is absent."""
        return Fields(self.get(name, dict, {}), f"{self._at}{name}")

    def role(self, roles: Sequence[str]) -> str:
        """Return the role of a message; the developer's is `system` for chat templates."""
        role = self.required("role", str)
        if role not in roles:
            raise self.refused("role", f"{role!r} is not one of {', '.join(roles)}")
        return "system" if role == "developer" else role

    def number(self, name: str, least: int, most: int | None = None) -> int | None:
        """Return an integer within bounds; None if it is absent."""
        if name not in self:
            return None
        value = self.get(name, int, least)
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise self.refused(name, f"must be {bounds}, got {value}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a string or a list of strings as a tuple; an empty one if the field is absent."""
        value = self.raw(name)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
            raise self.refused(name, f"must be a string or a list of strings, got {_shown(value)}")
        return tuple(values)

    def stop_strings(self, name: str) -> tuple[str, ...]:
        """Return stop strings; an empty tuple if the field is absent."""
        found = self.strings(name)
        if len(found) > MAX_STOP_STRINGS or any(len(each) > MAX_STOP_CHARACTERS for each in found):
            raise self.refused(name, f"has a maximum of {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARACTERS} characters")
        return found

    def refuse_others_than(self, name: str, allowed: Iterable[Any], remedy: str) -> None:
        """Refuse a field that asks for something that is not offered.

        Args:
            name: Key of the field in the body.
            allowed: Values that ask for nothing.
            remedy: What to do instead.
        """
        value = self.raw(name)
        if value is not None and value not in list(allowed):
            raise self.refused(name, f"{_shown(value)} is not offered; {remedy}")

    def answer_format(self, name: str) -> str:
        """Return the JSON schema that a field asks the text of the answer to match, as JSON; empty for any text.

        Raises:
            CallRefused: If it asks for another format.
        """
        try:
            return requested_schema(self.raw(name))
        except ValueError as error:
            raise self.refused(name, str(error)) from None

    def formed(self, name: str, schema: str, given: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of a call about its tools, and about the form that it asks for.

        Args:
            name: Name of the field that asks for a format of the text.
            schema: The `answer_format` that it asks for.
            given: Tools of the request.
        """
        tools, reads_calls, forced = self._tool_choice(function_tools(given))
        # Chat Completions nests the field in the function.
        is_strict = any(each.get("function", each).get("strict") is True for each in given) and reads_calls
        asked = {name: bool(schema), "tool_choice": forced is not None, "tools.strict": is_strict}
        found: dict[str, Any] = {"tools": tools, "reads_calls": reads_calls}
        if fields := tuple(field for field, is_asked in asked.items() if is_asked):
            callable_tools = (tools if reads_calls else ()) if forced is None else forced
            form = AnswerForm(schema if forced is None else "", json.dumps(callable_tools), forced is not None)
            found |= {"form": form, "form_fields": fields}
        return found

    def _tool_choice(self, tools: Tools) -> tuple[Tools, bool, Tools | None]:
        """Return the tools that the policy sees, whether calls are read, and the tools of a forced call.

        The tools of a forced call are None if no call is forced.

        Args:
            tools: Tools of the request; `allowed_tools` selects some of them.
        """
        value = self.raw("tool_choice")
        kind = value.get("type") if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and kind == "allowed_tools":
            # Chat Completions nests the fields that Responses has next to the type.
            at = f"{self._at}tool_choice.allowed_tools"
            allowed = Fields(value.get("allowed_tools", value), at)
            kind = allowed.get("mode", str, "auto")
            names = [
                each["function"]["name"] for each in function_tools(allowed.required("tools", list), f"{at}.tools")
            ]
            own = {tool["function"]["name"]: tool for tool in tools}
            if missing := [name for name in names if name not in own]:
                raise allowed.refused("tools", f"has {missing[0]!r}, which is not one of the tools of the request")
            tools = tuple(tool for name, tool in own.items() if name in names)
        if kind in (None, "auto", "none"):
            return tools, kind != "none", None
        if kind in ("required", "any"):
            return tools, True, tools
        if isinstance(value, Mapping) and kind in ("function", "tool", "custom"):
            chosen = Fields(value.get(kind, value), f"{self._at}tool_choice").required("name", str)
            return tools, True, tuple(tool for tool in tools if tool["function"]["name"] == chosen)
        remedy = "pass auto or none, and allowed_tools or fewer tools"
        raise self.refused("tool_choice", f"{_shown(value)} is not offered; {remedy}")

    def sampling_set_by_client(self) -> tuple[str, ...]:
        """Return the fields of `CHOSEN_BY_THE_RUN` that the request sets."""
        return tuple(name for name in CHOSEN_BY_THE_RUN if name in self)

    def refused(self, name: str, problem: str) -> CallRefused:
        """Return the error about a field."""
        return CallRefused(f"{self._at}{name} {problem}", param=f"{self._at}{name}")


def function_tools(given: Sequence[Any], at: str = "tools") -> Tools:
    """Return tools in the form that chat templates take, from OpenAI's nested form, or the flat one of the Responses
    API and of Anthropic.

    Raises:
        CallRefused: If a tool is not a function with a name.
    """
    found = []
    for index, tool in enumerate(given):
        fields = Fields(tool, f"{at}[{index}]")
        if fields.get("type", str, "function") not in ("function", "custom"):
            raise fields.refused("type", f"{_shown(fields.raw('type'))} is not offered; pass functions only")
        if "function" in fields:
            fields = Fields(fields.raw("function"), f"{at}[{index}].function")
        schema = fields.raw("parameters") or fields.raw("input_schema") or {"type": "object", "properties": {}}
        described = {"name": fields.required("name", str), "description": fields.get("description", str, "")}
        found.append({"type": "function", "function": {**described, "parameters": schema}})
    return tuple(found)


def tool_call(call_id: str, name: str, arguments: Any, at: str) -> dict[str, Any]:
    """Return a call of a tool as chat templates take it.

    Args:
        call_id: Id of the call; empty if the client gave none.
        name: Name of the tool.
        arguments: An object, or the JSON text of one; text that is not JSON stays text.
        at: Place of the arguments in the request, for error messages.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if not isinstance(arguments, Mapping):
        raise CallRefused(f"{at}: arguments must be an object, got {_shown(arguments)}", param=at)
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": dict(arguments)}}


def text_of_parts(content: Any, at: str) -> str:
    """Return the text of a message's content: a string, null, or a list of parts that are text.

    Raises:
        CallRefused: If a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused(f"{at} must be a string or a list of parts, got {_shown(content)}", param=at)
    return "".join(text_of_part(part, f"{at}[{index}]") for index, part in enumerate(content))


def text_of_part(part: Any, at: str) -> str:
    """Return the text of a part of a message's content.

    Raises:
        CallRefused: If it is not text.
    """
    fields = Fields(part, at)
    kind = fields.get("type", str, "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        problem = "is not offered here; pass text, and images in messages of the user and results of tools"
        raise fields.refused("type", f"{kind!r} {problem}")
    return fields.get("refusal" if kind == "refusal" else "text", str, "")


def content_of(content: Any, at: str) -> Content:
    """Return a content with its text and images as chat templates take it; images are put into the run's store.

    Args:
        content: A string, null, or a list of parts.
        at: Its place in the request, for error messages.

    Raises:
        CallRefused: If a part is neither text nor an image that can be used.
    """
    if not isinstance(content, list):
        return text_of_parts(content, at)
    return joined([part_of(part, f"{at}[{index}]") for index, part in enumerate(content)])


def joined(parts: Sequence[str | Mapping[str, Any]]) -> Content:
    """Return texts and images as one content: a string without images."""
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else joined_parts(parts)


def part_of(part: Any, at: str) -> str | Mapping[str, Any]:
    """Return the text of a part of a message's content, or its image as a part that refers to the run's store.

    Raises:
        CallRefused: If it is neither, or the image cannot be used.
    """
    fields = Fields(part, at)
    kind = fields.get("type", str, "text")
    if kind not in ("image_url", "input_image", "image"):
        return text_of_part(part, at)
    if kind == "image":
        given, name = fields.section("source"), "data"
        given.refuse_others_than("type", ["base64"], _NO_DOWNLOADS)
        url = f"data:{given.get('media_type', str, '')};base64,{given.required(name, str)}"
    else:
        is_nested = isinstance(fields.raw("image_url"), Mapping)
        given, name = (fields.section("image_url"), "url") if is_nested else (fields, "image_url")
        url = given.required(name, str)
    if not url.startswith("data:"):
        raise given.refused(name, f"is not a data URL (data:image/png;base64,...), got {_shown(url)}; {_NO_DOWNLOADS}")
    try:
        return ImageStore.of_run().put(RowImages(folder=None).read(url)).part()
    except (ImageError, ImportError) as error:
        raise given.refused(name, f"cannot be used: {error}") from None


def conversation(messages: Iterable[Message], at: str = "messages") -> tuple[Message, ...]:
    """Return the messages of a conversation.

    Raises:
        CallRefused: If there are none.
    """
    found = tuple(messages)
    if not found:
        raise CallRefused(f"{at} is empty; pass at least one message", param=at)
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
