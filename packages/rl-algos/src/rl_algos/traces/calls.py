"""Calls of language models in files of traces and of chat logs."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import DataError

MAX_LINE = 64 * 2**20
"""Maximum number of bytes of a line. Longer ones are not read."""

INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
"""Attributes of the newest convention, of spans or of the event `gen_ai.client.inference.operation.details`."""

_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE = "gen_ai.choice"
"""Events of the convention before, each with one message."""

_EVALUATION = "gen_ai.evaluation.result"
_GRADES = {True: 1.0, False: 0.0, "up": 1.0, "down": 0.0, "thumbs_up": 1.0, "thumbs_down": 0.0, "good": 1.0, "bad": 0.0}


@dataclass
class TracedCall:
    """A call of a language model, with its answer.

    Args:
        place: Place in the files, for messages.
        messages: Messages that were sent, in OpenAI's form.
        reply: Message of the answer; None if the trace lacks it.
        tools: Tools that were offered, in OpenAI's form.
        model: Name of the model that answered.
        response_id: Id of the answer.
        score: Feedback; higher is better. None without.
        num_prompt, num_completion: Number of tokens that were served; None if the trace does not have them.
        prompt_ids, completion_ids: These tokens; None if the trace does not have them.
    """

    place: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    reply: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    response_id: str = ""
    score: float | None = None
    num_prompt: int | None = None
    num_completion: int | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None


@dataclass
class ReadTraces:
    """The contents of files.

    Args:
        calls: Calls, in the order in which the files have them.
        faults: Places that could not be read, each with the reason.
        num_others: Number of spans and events that are not calls.
    """

    calls: list[TracedCall] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_others: int = 0


def read_traces(path: str) -> ReadTraces:
    """Read the calls in files of JSON lines, or of one JSON value each.

    Only the fields that a call consists of are taken, so headers and keys in other attributes are left behind. A line
    that cannot be read is a fault and costs nothing else.

    Args:
        path: A file, a folder with `.jsonl` and `.json` files, or a glob pattern.

    Raises:
        DataError: If there is no such file.
    """
    root = Path(path).expanduser()
    names = sorted(str(each) for kind in ("*.jsonl", "*.json") for each in root.rglob(kind)) if root.is_dir() else []
    names = names or [name for name in sorted(glob.glob(str(root), recursive=True)) if Path(name).is_file()]
    if not names:
        raise DataError(f"traces: {path} is not a file, nor a folder with .jsonl or .json files")
    reader = _Reader()
    for name in names:
        for place, value in _values(Path(name), reader.found.faults):
            try:
                reader.read(value, place)
            except (DataError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
                reader.found.faults.append(f"{place}: {type(error).__name__}: {error}"[:300])
    return reader.finished()


def _values(path: Path, faults: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file with their places."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            place = f"{path.name}, line {number}"
            if len(line) > MAX_LINE:
                faults.append(f"{place}: it has more than {MAX_LINE} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE)
                continue
            if number == 1 and path.suffix == ".json":
                # An indented value spans all lines of the file.
                line += file.read(MAX_LINE)
                if file.read(1):
                    faults.append(f"{path.name}: it has more than {MAX_LINE} bytes; write JSON lines instead")
                    return
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                json.dumps(value, ensure_ascii=False).encode()  # Halves of characters cannot be tokenised.
            except (ValueError, RecursionError) as error:
                faults.append(f"{place}: it is not valid JSON: {error}"[:300])
                continue
            for index, each in enumerate(value) if isinstance(value, list) else [(0, value)]:
                yield f"{place}, item {index + 1}" if isinstance(value, list) else place, each


class _Reader:
    """Collects the events of each span, which may come before it, after it, or without it."""

    def __init__(self) -> None:
        self.found = ReadTraces()
        self._spans: dict[str, TracedCall] = {}
        self._scores: list[tuple[str, str, float]] = []

    def read(self, value: Any, place: str) -> None:
        if not isinstance(value, Mapping):
            raise DataError(f"expected an object, got {json.dumps(value)[:60]}")
        groups = [("resourceSpans", "scopeSpans", "spans"), ("resourceLogs", "scopeLogs", "logRecords")]
        for outer, middle, inner in groups:
            for resource in _list(value.get(outer)):
                for scope in _list(resource.get(middle)):
                    for each in _list(scope.get(inner)):
                        self._record(_plain_record(each), place)
        if "resourceSpans" in value or "resourceLogs" in value:
            return
        if isinstance(value.get("attributes"), Mapping):
            self._record(value, place)
        elif "request" in value or "messages" in value:
            self.found.calls.append(_logged(value, place))
        else:
            self.found.num_others += 1

    def _record(self, record: Mapping[str, Any], place: str) -> None:
        """Read a span, or a log record that is an event."""
        attributes = record["attributes"]
        context = record.get("context")
        if not isinstance(context, Mapping):
            context = record
        # Records without an id are calls of their own.
        span = f"{context.get('trace_id')}/{context['span_id']}" if context.get("span_id") else place
        event = str(record.get("event_name") or attributes.get("event.name") or "")
        if "body" in record or event:
            self._event(event, span, attributes, record.get("body"), place)
            return
        for each in _list(record.get("events")):
            self._event(str(each.get("name")), span, each.get("attributes") or {}, None, place)
        if any(name.startswith("gen_ai.") for name in attributes) and _is_chat(attributes):
            self._take(self._call(span, place), attributes)
        else:
            self.found.num_others += 1

    def _call(self, span: str, place: str) -> TracedCall:
        if span not in self._spans:
            self._spans[span] = TracedCall(place)
            self.found.calls.append(self._spans[span])
        return self._spans[span]

    def _event(self, name: str, span: str, attributes: Mapping[str, Any], body: Any, place: str) -> None:
        given = {**attributes, **body} if isinstance(body, Mapping) else attributes
        if name in _ROLES:
            message = {"role": _ROLES[name], **{key: given[key] for key in _MESSAGE if key in given}}
            if name == "gen_ai.tool.message" and "id" in given:
                message["tool_call_id"] = given["id"]
            self._call(span, place).messages.append(_message(message))
        elif name == _CHOICE:
            call = self._call(span, place)
            message = _json(given.get("message"))
            if isinstance(message, str):
                message = {"content": message}
            if call.reply is None and isinstance(message, Mapping):
                chosen = {key: message[key] for key in _MESSAGE if key in message}
                call.reply = _message({"tool_calls": given.get("tool_calls"), **chosen, "role": "assistant"})
        elif name == "gen_ai.client.inference.operation.details":
            self._take(self._call(span, place), given)
        elif name == _EVALUATION:
            score = _grade(given.get("gen_ai.evaluation.score.value"))
            if score is not None:
                self._scores.append((span, str(given.get("gen_ai.response.id") or ""), score))
        else:
            self.found.num_others += 1

    def _take(self, call: TracedCall, attributes: Mapping[str, Any]) -> None:
        """Take the attributes of a call, of a span or of an event."""
        if INPUT in attributes:
            call.messages = [each for given in _list(_json(attributes[INPUT])) for each in _of_parts(given)]
        if SYSTEM in attributes and not any(each["role"] == "system" for each in call.messages):
            text = _text(_list(_json(attributes[SYSTEM])))
            call.messages = [{"role": "system", "content": text}, *call.messages]
        if TOOLS in attributes:
            call.tools = [_tool(each) for each in _list(_json(attributes[TOOLS]))]
        # The answer is last: a call without one is no row, so nothing of a call that cannot be read is learned.
        if OUTPUT in attributes and (replies := _list(_json(attributes[OUTPUT]))):
            (call.reply,) = _of_parts(replies[0])
        call.model = str(attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model") or "")
        call.response_id = str(attributes.get("gen_ai.response.id") or "")
        call.num_prompt = _count(attributes.get("gen_ai.usage.input_tokens"), call.num_prompt)
        call.num_completion = _count(attributes.get("gen_ai.usage.output_tokens"), call.num_completion)

    def finished(self) -> ReadTraces:
        """Return what was read, with each score at its call, and the calls without content among the others."""
        by_id = {call.response_id: call for call in self.found.calls if call.response_id}
        for span, response, score in self._scores:
            call = by_id.get(response) or self._spans.get(span)
            if call is not None:
                call.score = score
        known = [call for call in self.found.calls if call.messages and call.reply is not None]
        self.found.num_others += len(self.found.calls) - len(known)
        self.found.calls = known
        return self.found


_MESSAGE = ("content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""Fields of a message that rows keep."""


def _is_chat(attributes: Mapping[str, Any]) -> bool:
    operation = attributes.get("gen_ai.operation.name", "chat")
    return operation in ("chat", "generate_content", "text_completion")


def _plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span or a log record of OTLP with plain values."""
    plain: dict[str, Any] = {"trace_id": record.get("traceId"), "span_id": record.get("spanId")}
    plain["attributes"] = _plain_list(record.get("attributes"))
    if "body" in record or "eventName" in record:
        plain |= {"body": _plain(record.get("body") or {}), "event_name": record.get("eventName")}
    plain["events"] = [
        {"name": each.get("name"), "attributes": _plain_list(each.get("attributes"))}
        for each in _list(record.get("events"))
    ]
    return plain


def _plain_list(values: Any) -> dict[str, Any]:
    return {str(each["key"]): _plain(each.get("value") or {}) for each in _list(values)}


def _plain(value: Mapping[str, Any]) -> Any:
    """Return a value of OTLP's JSON, whose numbers may be strings."""
    for kind, found in value.items():
        match kind:
            case "intValue":
                return int(found)
            case "arrayValue":
                return [_plain(each) for each in _list(found.get("values"))]
            case "kvlistValue":
                return _plain_list(found.get("values"))
            case _:
                return found
    return None


def _of_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of one message of the newest convention: each answer of a tool is a message."""
    parts = _list(message.get("parts"))
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    if results:
        given = [part.get("response", part.get("result")) for part in results]
        texts = [each if isinstance(each, str) else json.dumps(each) for each in given]
        return [
            {"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": text}
            for part, text in zip(results, texts, strict=True)
        ]
    made: dict[str, Any] = {"role": str(message["role"]), "content": _text(parts)}
    thoughts = "".join(str(part.get("content", "")) for part in parts if part.get("type") in ("reasoning", "thinking"))
    calls = [
        {
            "id": part.get("id"),
            "type": "function",
            "function": {"name": part["name"], "arguments": part.get("arguments")},
        }
        for part in parts
        if part.get("type") == "tool_call"
    ]
    return [_message({**made, "reasoning_content": thoughts or None, "tool_calls": calls or None})]


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    others = {str(part.get("type")) for part in parts} - {"text", "tool_call", "reasoning", "thinking"}
    if others:
        raise DataError(f"it has parts of the type {', '.join(sorted(others))}, which are not text")
    return "".join(str(part["content"]) for part in parts if part.get("type") == "text")


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form, without empty fields; arguments of calls are objects."""
    made = {"role": str(given["role"]), **{key: given[key] for key in _MESSAGE if given.get(key) is not None}}
    content = made.get("content", "")
    if isinstance(content, list):
        content = _text([{**part, "content": part.get("text", "")} for part in content])
    made["content"] = content
    if calls := _list(_json(made.pop("tool_calls", None))):
        made["tool_calls"] = [
            {
                **({"id": str(call["id"])} if call.get("id") else {}),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": _json(call["function"].get("arguments")) or {},
                },
            }
            for call in calls
        ]
    return made


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    function = given["function"] if isinstance(given.get("function"), Mapping) else given
    kept = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": kept}


def _logged(value: Mapping[str, Any], place: str) -> TracedCall:
    """Return the call of a line of a chat log: a request and a response as OpenAI's API has them."""
    request = value.get("request", value)
    request = request.get("body", request)
    response = value.get("response", value)
    response = response.get("body", response) if isinstance(response, Mapping) else {"choices": [response]}
    call = TracedCall(place, [_message(each) for each in _list(request.get("messages"))])
    choices = _list(response.get("choices"))
    if choices:
        choice: Any = choices[0] if isinstance(choices[0], Mapping) else {"message": {"content": str(choices[0])}}
        call.reply = _message({**choice["message"], "role": "assistant"})
        call.completion_ids = choice.get("token_ids")
    elif call.messages and call.messages[-1]["role"] == "assistant":
        call.reply = call.messages.pop()
    usage = response.get("usage") or {}
    call.tools = [_tool(each) for each in _list(request.get("tools"))]
    call.model = str(response.get("model") or request.get("model") or "")
    call.response_id = str(response.get("id") or "")
    call.num_prompt, call.num_completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    call.prompt_ids = response.get("prompt_token_ids")
    for name in ("score", "reward", "rating", "feedback"):
        feedback = value.get(name)
        grade = _grade(feedback.get("score", feedback.get("value")) if isinstance(feedback, Mapping) else feedback)
        if grade is not None:
            call.score = grade
            break
    return call


def _grade(value: Any) -> float | None:
    if isinstance(value, bool | str):
        return _GRADES.get(value.lower() if isinstance(value, str) else value)
    if isinstance(value, int | float) and abs(value) < 1e30:  # NaN is not below anything either.
        return float(value)
    return None


def _count(value: Any, otherwise: int | None = None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _json(value: Any) -> Any:
    """Return the value of JSON text; other values, and text that is not JSON, as they are."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
