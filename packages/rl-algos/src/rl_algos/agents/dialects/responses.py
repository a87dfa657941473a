"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from rl_algos.agents.calls import COMMENT, Answer, Call, CallRefused, Choice, Event
from rl_algos.agents.dialects.openai_errors import openai_error
from rl_algos.agents.fields import Fields, check_conversation, function_tools, text_of_parts, tool_call
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.rollout import Message

_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = "message.output_text.logprobs"
# what encrypted reasoning is for, sending reasoning back in a later request, needs nothing here: it is dropped there
_NO_EFFECT = "reasoning.encrypted_content"


class Responses:
    """The dialect of `client.responses.create`.

    A rollout keeps its answers, unless they ask for `store: false`, so that `previous_response_id` continues them.
    """

    heartbeat = COMMENT

    def read(self, body: Mapping[str, Any]) -> Call:
        """Return the call that a request asks for."""
        fields = Fields(body)
        _refuse_what_is_not_offered(fields)
        included = fields.strings("include")
        items = fields.raw("input")
        given = [{"role": "user", "content": items}] if isinstance(items, str) else fields.required("input", list)
        messages = _messages(given)
        check_conversation(messages, "input")
        instructions = fields.get("instructions", str, "")
        system = ({"role": "system", "content": instructions},) if instructions else ()
        tools, reads_calls, forced = fields.tool_choice(_tools(fields.get("tools", list, [])))
        return Call(
            messages=(*system, *messages),
            tools=tools,
            reads_calls=reads_calls,
            max_new_tokens=fields.number("max_output_tokens", 1),
            wants_logprobs=_LOGPROBS in included,
            is_streamed=fields.get("stream", bool, False),
            wants_usage=True,
            model=fields.get("model", str, ""),
            ignored=(*fields.sampling_set_by_client(), *forced, *_without_effect(fields)),
            continues=fields.get("previous_response_id", str, ""),
            num_instructions=len(system),
            is_stored=fields.get("store", bool, True),
        )

    def answer(self, call: Call, answer: Answer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        [choice] = answer.choices
        is_cut = choice.finish_reason == "length"
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": call.messages[0]["content"] if call.num_instructions else None,
            "max_output_tokens": call.max_new_tokens,
            "metadata": {},
            "model": call.model,
            "output": _output(call, answer.id, choice),
            "parallel_tool_calls": True,
            "previous_response_id": call.continues or None,
            "store": call.is_stored,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto" if call.reads_calls else "none",
            "tools": [{"type": "function", **tool["function"], "strict": False} for tool in call.tools],
            "top_p": None,
            "truncation": "disabled",
            "usage": _usage(answer),
        }

    def events(self, call: Call, answer: Answer) -> Iterator[Event]:
        """Yield the events of a streamed answer: its start, each item of its output, and its end."""
        numbers = count()

        def event(kind: str, **data: Any) -> Event:
            return Event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        whole = self.answer(call, answer)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            yield from _item_events(event, index, item)
        yield event(f"response.{whole['status']}", response=whole)

    def error(self, refused: CallRefused) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai_error(refused)


def _refuse_what_is_not_offered(fields: Fields) -> None:
    """Refuse the fields that ask for another answer than one that is sampled freely, and at once."""
    fields.refuse_others_than("background", [False], "answers are sent at once; remove it")
    fields.refuse_others_than("conversation", [], "pass previous_response_id, or the whole conversation as input")
    fields.refuse_others_than("prompt", [], "pass instructions and input")
    fields.refuse_others_than("truncation", ["disabled"], "leave out earlier items of the input in the agent")
    fields.refuse_others_than("top_logprobs", [0], f"the logprobs of the sampled tokens are: include=[{_LOGPROBS!r}]")
    text = Fields(fields.get("text", dict, {}), "text")
    text.refuse_others_than(
        "format", [{"type": "text"}], "completions are sampled freely; parse and check them in the agent"
    )
    for name in fields.strings("include"):
        if name not in (_LOGPROBS, _NO_EFFECT):
            raise fields.refused("include", f"{name!r} is not offered; allowed are {_LOGPROBS} and {_NO_EFFECT}")


def _without_effect(fields: Fields) -> Iterator[str]:
    """Yield the fields that ask for another way to think or to call, which only the policy decides."""
    if fields.get("parallel_tool_calls", bool, True) is False:
        yield "parallel_tool_calls"
    if fields.get("reasoning", dict, {}):
        yield "reasoning"
    if "verbosity" in Fields(fields.get("text", dict, {}), "text"):
        yield "text.verbosity"


def _tools(given: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    for index, tool in enumerate(given):
        Fields(tool, f"tools[{index}]").refuse_others_than("type", ["function"], "pass functions only")
    return function_tools(given)


def _messages(items: Sequence[Any]) -> tuple[Message, ...]:
    """The messages of a list of items: a turn of the policy is a message, the calls after it, or both."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        at = f"input[{index}]"
        fields = Fields(item, at)
        kind = fields.get("type", str, "message")
        if kind == "message":
            messages.append(_message(fields, at))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_made(fields, at))
        elif kind == "function_call_output":
            said = text_of_parts(fields.raw("output"), f"{at}.output")
            messages.append({"role": "tool", "content": said, "tool_call_id": fields.required("call_id", str)})
        elif kind != "reasoning":
            allowed = "message, function_call, function_call_output or reasoning"
            raise fields.refused("type", f"{kind!r} is not offered; pass {allowed}")
    return tuple(messages)


def _message(fields: Fields, at: str) -> dict[str, Any]:
    role = fields.required("role", str)
    if role not in _ROLES:
        raise fields.refused("role", f"{role!r} is not one of {', '.join(_ROLES)}")
    content = text_of_parts(fields.raw("content"), f"{at}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _made(fields: Fields, at: str) -> dict[str, Any]:
    arguments = fields.raw("arguments") or ""
    return tool_call(fields.required("call_id", str), fields.required("name", str), arguments, at)


def _output(call: Call, answer_id: str, choice: Choice) -> list[dict[str, Any]]:
    """The items of an answer: thoughts, text and calls, of which the last one is incomplete if a limit was met."""
    calls = [made for made in choice.tool_calls if not made.error]
    items = []
    if choice.thoughts:
        content = [{"type": "reasoning_text", "text": choice.thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "content": content})
    if choice.text or not calls:
        part = {
            "type": "output_text",
            "text": choice.text,
            "annotations": [],
            "logprobs": _logprobs(choice) if call.wants_logprobs else [],
        }
        items.append({"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "content": [part]})
    items += map(_written, calls)
    is_cut = choice.finish_reason == "length"
    statuses = ["completed"] * (len(items) - 1) + ["incomplete" if is_cut else "completed"]
    return [{**item, "status": status} for item, status in zip(items, statuses, strict=True)]


def _written(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }


def _logprobs(choice: Choice) -> list[dict[str, Any]]:
    tokens = zip(choice.pieces, choice.completion.logprobs.tolist(), strict=True)
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in tokens
    ]


def _item_events(event: Callable[..., Event], index: int, item: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of one item of the output: its start, its text as one delta, and its end."""
    begun = {**item, "status": "in_progress"}
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        yield event("response.output_item.added", output_index=index, item={**begun, "arguments": ""})
        yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
        yield event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
    else:
        yield event("response.output_item.added", output_index=index, item={**begun, "content": []})
        [part] = item["content"]
        yield from _part_events(event, {**at, "content_index": 0}, part)
    yield event("response.output_item.done", output_index=index, item=item)


def _part_events(event: Callable[..., Event], at: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of the text of an item."""
    # the events of thoughts have no logprobs
    logprobs: Mapping[str, Any] = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    begun: Mapping[str, Any] = {name: [] for name in logprobs}
    yield event("response.content_part.added", **at, part={**part, "text": "", **begun})
    if part["text"]:
        yield event(f"response.{part['type']}.delta", **at, delta=part["text"], **logprobs)
    yield event(f"response.{part['type']}.done", **at, text=part["text"], **logprobs)
    yield event("response.content_part.done", **at, part=part)


def _usage(answer: Answer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
    }
