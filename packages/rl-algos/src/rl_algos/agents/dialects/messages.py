"""Anthropic's Messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_algos.agents.calls import CallRefused, ModelAnswer, ModelCall, StreamEvent
from rl_algos.agents.fields import (
    Fields,
    content_of,
    conversation,
    joined,
    part_of,
    text_of_part,
    text_of_parts,
    tool_call,
)
from rl_core.rollouts.rollout import Message

PREFILL = "prefill"
"""Name of a last message of the assistant among the fields without effect: the policy writes its whole turn."""

_ROLES = ("user", "assistant", "system")
# Claude Code opens its instructions with a block that differs in each call, so no call would continue a branch.
_OF_ONE_CALL = "x-anthropic-billing-header"
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ERRORS |= {429: "rate_limit_error"}


class Messages:
    """The dialect of `client.messages.create`."""

    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call that a request asks for."""
        fields = Fields(body)
        _check_offered(fields)
        limit = fields.number("max_tokens", 1)
        if limit is None:
            raise fields.refused("max_tokens", "is missing; pass the maximum number of tokens to sample")
        given = enumerate(fields.required("messages", list))
        messages = conversation(each for index, one in given for each in _turn(one, f"messages[{index}]"))
        instructions = fields.raw("system")
        if isinstance(instructions, list):
            texts = [text_of_part(block, f"system[{index}]") for index, block in enumerate(instructions)]
            instructions = "".join(text for text in texts if not text.startswith(_OF_ONE_CALL))
        else:
            instructions = text_of_parts(instructions, "system")
        system = ({"role": "system", "content": instructions},) if instructions else ()
        # The field was `output_format` before it became a part of `output_config`.
        form, schema = "output_format", fields.answer_format("output_format")
        if not schema:
            form, schema = "output_config.format", fields.section("output_config").answer_format("format")
        return ModelCall(
            messages=(*system, *messages),
            max_new_tokens=limit,
            stop_strings=fields.stop_strings("stop_sequences"),
            is_streamed=fields.get("stream", bool, False),
            wants_usage=True,
            model=fields.get("model", str, ""),
            ignored=(*fields.sampling_set_by_client(), *_without_effect(fields, messages)),
            **fields.formed(form, schema, fields.get("tools", list, [])),
        )

    def answer(self, call: ModelCall, answer: ModelAnswer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        [choice] = answer.choices
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
            for call in choice.readable_calls
        ]
        content: list[dict[str, Any]] = []
        if choice.thoughts:
            content.append({"type": "thinking", "thinking": choice.thoughts, "signature": ""})
        # Clients read the first block, so there is an empty text if the policy wrote nothing.
        if choice.text or not calls:
            content.append({"type": "text", "text": choice.text})
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": [*content, *calls],
            "stop_reason": "stop_sequence" if choice.stop_string else reasons[choice.finish_reason],
            "stop_sequence": choice.stop_string or None,
            "usage": {
                "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": answer.num_cached_tokens,
                "output_tokens": answer.num_sampled,
            },
        }

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """Yield the events of a streamed answer: its start, each block with one delta, and its end."""
        whole = self.answer(call, answer)
        usage = {**whole["usage"], "output_tokens": 0}
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            match block["type"]:
                case "tool_use":
                    written = json.dumps(block["input"], ensure_ascii=False)
                    empty: dict[str, Any] = {"input": {}}
                    deltas = [{"type": "input_json_delta", "partial_json": written}]
                case "thinking":
                    empty = {"thinking": ""}
                    deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                    deltas.append({"type": "signature_delta", "signature": ""})
                case _:
                    empty = {"text": ""}
                    deltas = [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
            yield _event("content_block_start", index=index, content_block={**block, **empty})
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=end, usage=whole["usage"])
        yield _event("message_stop")

    def error(self, refused: CallRefused) -> Mapping[str, Any]:
        """Return the body of an error."""
        kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _check_offered(fields: Fields) -> None:
    """Refuse the fields that ask for another answer than one that is sampled freely from the input."""
    fields.refuse_others_than("mcp_servers", [[]], "call the servers in the agent, and pass their tools as functions")
    fields.refuse_others_than("container", [], "run code in the agent")
    for index, given in enumerate(fields.section("context_management").get("edits", list, [])):
        edit = Fields(given, f"context_management.edits[{index}]")
        # Thoughts of earlier turns are dropped in any case.
        if not edit.required("type", str).startswith("clear_thinking"):
            raise edit.refused("type", f"{edit.raw('type')!r} is not offered; edit the conversation in the agent")


def _without_effect(fields: Fields, messages: Sequence[Message]) -> Iterator[str]:
    """Yield the fields that ask for another way to think, to begin or to call, which only the policy decides."""
    if messages[-1]["role"] == "assistant":
        yield PREFILL
    choice = fields.raw("tool_choice")
    if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
        yield "tool_choice.disable_parallel_tool_use"
    if fields.get("thinking", dict, {}):
        yield "thinking"
    if "effort" in fields.section("output_config"):
        yield "output_config.effort"


def _turn(given: Any, at: str) -> Iterator[Message]:
    """Yield the messages of one turn: each result of a tool is its own message, in order."""
    fields = Fields(given, at)
    role, content = fields.role(_ROLES), fields.raw("content")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of_parts(content, f"{at}.content")}
        return
    parts: list[str | Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        place = f"{at}.content[{index}]"
        part = Fields(block, place)
        kind = part.required("type", str)
        if role == "assistant" and kind == "tool_use":
            call_id, name = part.required("id", str), part.required("name", str)
            calls.append(tool_call(call_id, name, part.raw("input") or {}, f"{place}.input"))
        elif role != "assistant" and kind == "tool_result":
            if parts:
                yield {"role": role, "content": joined(parts)}
                parts = []
            result = content_of(part.raw("content"), f"{place}.content")
            # Chat templates have no place for the flag.
            if part.get("is_error", bool, False):
                if not isinstance(result, str):
                    result = joined(["Error: ", *result])
                elif not result.lower().startswith("error"):
                    result = f"Error: {result}" if result else "Error"
            yield {"role": "tool", "content": result, "tool_call_id": part.required("tool_use_id", str)}
        elif role != "assistant" or kind not in ("thinking", "redacted_thinking"):
            parts.append((part_of if role == "user" else text_of_part)(block, place))
    if parts or not content or role == "assistant":
        message = {"role": role, "content": joined(parts)}
        yield {**message, "tool_calls": calls} if calls else message


def _event(kind: str, **data: Any) -> StreamEvent:
    return StreamEvent({"type": kind, **data}, kind)
