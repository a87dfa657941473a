"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from rl_algos.agents.calls import COMMENT, ModelAnswer, ModelCall, ModelChoice, StreamEvent
from rl_algos.agents.dialects.completions import logprobs_of_tokens, openai_error
from rl_algos.agents.fields import Fields, content_of, conversation, text_of_parts, tool_call
from rl_core.rollouts.rollout import Message

_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = "message.output_text.logprobs"
# Encrypted reasoning is for sending reasoning back in a later request. It is dropped there, so it needs nothing here.
_NO_EFFECT = "reasoning.encrypted_content"
_FIXED: dict[str, Any] = {
    "object": "response",
    "error": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "truncation": "disabled",
}
_FIXED |= {"temperature": None, "top_p": None, "text": {"format": {"type": "text"}}}


class Responses:
    """The dialect of `client.responses.create`.

    A rollout keeps its answers, unless they ask for `store: false`, so that `previous_response_id` continues them.
    """

    heartbeat = COMMENT
    error = staticmethod(openai_error)

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call that a request asks for."""
        fields = Fields(body)
        # Refuse the fields that ask for another answer than one that is sampled freely, and at once.
        fields.refuse_others_than("background", [False], "answers are sent at once; remove it")
        fields.refuse_others_than("conversation", [], "pass previous_response_id, or the whole conversation as input")
        fields.refuse_others_than("prompt", [], "pass instructions and input")
        fields.refuse_others_than("truncation", ["disabled"], "leave out earlier items of the input in the agent")
        fields.refuse_others_than(
            "top_logprobs", [0], f"the logprobs of the sampled tokens are: include=[{_LOGPROBS!r}]"
        )
        for name in fields.strings("include"):
            if name not in (_LOGPROBS, _NO_EFFECT):
                raise fields.refused("include", f"{name!r} is not offered; allowed are {_LOGPROBS} and {_NO_EFFECT}")
        items = fields.raw("input")
        given = [{"role": "user", "content": items}] if isinstance(items, str) else fields.required("input", list)
        messages = conversation(_messages(given), "input")
        instructions = fields.get("instructions", str, "")
        system = ({"role": "system", "content": instructions},) if instructions else ()
        tools = fields.get("tools", list, [])
        for index, tool in enumerate(tools):
            Fields(tool, f"tools[{index}]").refuse_others_than("type", ["function"], "pass functions only")
        return ModelCall(
            messages=(*system, *messages),
            max_new_tokens=fields.number("max_output_tokens", 1),
            wants_logprobs=_LOGPROBS in fields.strings("include"),
            is_streamed=fields.get("stream", bool, False),
            wants_usage=True,
            model=fields.get("model", str, ""),
            ignored=(*fields.sampling_set_by_client(), *_without_effect(fields)),
            **fields.formed("text.format", fields.section("text").answer_format("format"), tools),
            continues=fields.get("previous_response_id", str, ""),
            num_instructions=len(system),
            is_stored=fields.get("store", bool, True),
        )

    def answer(self, call: ModelCall, answer: ModelAnswer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        [choice] = answer.choices
        is_cut = choice.finish_reason == "length"
        return {
            **_FIXED,
            "id": answer.id,
            "created_at": answer.created,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": call.messages[0]["content"] if call.num_instructions else None,
            "max_output_tokens": call.max_new_tokens,
            "model": call.model,
            "output": _output(call, answer.id, choice),
            "previous_response_id": call.continues or None,
            "store": call.is_stored,
            "tool_choice": "auto" if call.reads_calls else "none",
            "tools": [{"type": "function", **tool["function"], "strict": False} for tool in call.tools],
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": answer.num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
            },
        }

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """Yield the events of a streamed answer: its start, the start, text and end of each item, and its end."""
        numbers = count()

        def event(kind: str, **data: Any) -> StreamEvent:
            name = f"response.{kind}"
            return StreamEvent({"type": name, "sequence_number": next(numbers), **data}, name)

        whole = self.answer(call, answer)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            open_item = {**item, "status": "in_progress"}
            if item["type"] == "function_call":
                yield event("output_item.added", output_index=index, item={**open_item, "arguments": ""})
                yield event("function_call_arguments.delta", **at, delta=item["arguments"])
                yield event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
            else:
                yield event("output_item.added", output_index=index, item={**open_item, "content": []})
                [part] = item["content"]
                at["content_index"] = 0
                # The events of thoughts have no logprobs.
                logprobs: Mapping[str, Any] = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield event("content_part.added", **at, part={**part, "text": "", **{key: [] for key in logprobs}})
                if part["text"]:
                    yield event(f"{part['type']}.delta", **at, delta=part["text"], **logprobs)
                yield event(f"{part['type']}.done", **at, text=part["text"], **logprobs)
                yield event("content_part.done", **at, part=part)
            yield event("output_item.done", output_index=index, item=item)
        yield event(whole["status"], response=whole)


def _without_effect(fields: Fields) -> Iterator[str]:
    """Yield the fields that ask for another way to think or to call, which only the policy decides."""
    if fields.get("parallel_tool_calls", bool, True) is False:
        yield "parallel_tool_calls"
    if fields.get("reasoning", dict, {}):
        yield "reasoning"
    if "verbosity" in fields.section("text"):
        yield "text.verbosity"


def _messages(items: Sequence[Any]) -> Sequence[Message]:
    """Return the messages of a list of items: a turn of the policy is a message, the calls after it, or both."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        at = f"input[{index}]"
        fields = Fields(item, at)
        kind = fields.get("type", str, "message")
        if kind == "message":
            role = fields.role(_ROLES)
            read = content_of if role == "user" else text_of_parts
            messages.append({"role": role, "content": read(fields.raw("content"), f"{at}.content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call_id, name = fields.required("call_id", str), fields.required("name", str)
            call = tool_call(call_id, name, fields.raw("arguments") or "", at)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = content_of(fields.raw("output"), f"{at}.output")
            messages.append({"role": "tool", "content": result, "tool_call_id": fields.required("call_id", str)})
        elif kind != "reasoning":
            allowed = "message, function_call, function_call_output or reasoning"
            raise fields.refused("type", f"{kind!r} is not offered; pass {allowed}")
    return messages


def _output(call: ModelCall, answer_id: str, choice: ModelChoice) -> list[dict[str, Any]]:
    """Return the items of an answer: thoughts, text and calls. The last one is incomplete if a limit was reached."""
    items: list[dict[str, Any]] = []
    if choice.thoughts:
        content = [{"type": "reasoning_text", "text": choice.thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "content": content})
    calls = choice.readable_calls
    if choice.text or not calls:
        logprobs = logprobs_of_tokens(choice) if call.wants_logprobs else []
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "content": [part]})
    for made in calls:
        arguments = json.dumps(made.arguments, ensure_ascii=False)
        item = {"type": "function_call", "id": f"fc_{made.id}", "call_id": made.id, "name": made.name}
        items.append({**item, "arguments": arguments})
    for item in items:
        item["status"] = "completed"
    if choice.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items
