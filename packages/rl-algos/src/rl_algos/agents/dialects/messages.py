"""Anthropic's Messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_algos.agents.calls import Answer, Call, CallRefused, Choice, Event
from rl_algos.agents.fields import Fields, check_conversation, function_tools, text_of_part, text_of_parts, tool_call
from rl_core.rollouts.rollout import Message

PREFILL = "prefill"
"""Name of a last message of the assistant among the fields without effect: the policy writes its whole turn."""

_ROLES = ("user", "assistant", "system")
# Claude Code opens its instructions with a block that differs in each call, so no call would continue a branch
_OF_ONE_CALL = "x-anthropic-billing-header"
_THOUGHTS = ("thinking", "redacted_thinking")
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Messages:
    """The dialect of `client.messages.create`."""

    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: Mapping[str, Any]) -> Call:
        """Return the call that a request asks for."""
        fields = Fields(body)
        _refuse_what_is_not_offered(fields)
        limit = fields.number("max_tokens", 1)
        if limit is None:
            raise fields.refused("max_tokens", "is missing; pass the maximum number of tokens to sample")
        given = fields.required("messages", list)
        messages = tuple(each for index, one in enumerate(given) for each in _turn(one, f"messages[{index}]"))
        check_conversation(messages)
        instructions = _instructions(fields.raw("system"))
        system = ({"role": "system", "content": instructions},) if instructions else ()
        tools, reads_calls, forced = fields.tool_choice(function_tools(fields.get("tools", list, [])))
        return Call(
            messages=(*system, *messages),
            tools=tools,
            reads_calls=reads_calls,
            max_new_tokens=limit,
            stop_strings=fields.stop_strings("stop_sequences"),
            is_streamed=fields.get("stream", bool, False),
            wants_usage=True,
            model=fields.get("model", str, ""),
            ignored=(*fields.sampling_set_by_client(), *forced, *_without_effect(fields, messages)),
        )

    def answer(self, call: Call, answer: Answer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        [choice] = answer.choices
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": _blocks(choice),
            "stop_reason": _stop_reason(choice),
            "stop_sequence": choice.stop_string or None,
            "usage": _usage(answer),
        }

    def events(self, call: Call, answer: Answer) -> Iterator[Event]:
        """Yield the events of a streamed answer: its start, each block with one delta, and its end."""
        whole = self.answer(call, answer)
        usage = {**whole["usage"], "output_tokens": 0}
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            empty, deltas = _deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
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


def _refuse_what_is_not_offered(fields: Fields) -> None:
    """Refuse the fields that ask for another answer than one that is sampled freely from what is given."""
    fields.refuse_others_than("mcp_servers", [[]], "call the servers in the agent, and pass their tools as functions")
    fields.refuse_others_than("container", [], "run code in the agent")
    free = "completions are sampled freely; parse and check them in the agent"
    fields.refuse_others_than("output_format", [], free)
    Fields(fields.get("output_config", dict, {}), "output_config").refuse_others_than("format", [], free)
    management = Fields(fields.get("context_management", dict, {}), "context_management")
    for index, given in enumerate(management.get("edits", list, [])):
        edit = Fields(given, f"context_management.edits[{index}]")
        # thoughts of earlier turns are dropped in any case
        if not edit.required("type", str).startswith("clear_thinking"):
            raise edit.refused("type", f"{edit.raw('type')!r} is not offered; edit the conversation in the agent")


def _instructions(given: Any) -> str:
    if not isinstance(given, list):
        return text_of_parts(given, "system")
    texts = (text_of_part(block, f"system[{index}]") for index, block in enumerate(given))
    return "".join(text for text in texts if not text.startswith(_OF_ONE_CALL))


def _without_effect(fields: Fields, messages: Sequence[Message]) -> Iterator[str]:
    """Yield the fields that ask for another way to think, to begin or to call, which only the policy decides."""
    if messages[-1]["role"] == "assistant":
        yield PREFILL
    choice = fields.raw("tool_choice")
    if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
        yield "tool_choice.disable_parallel_tool_use"
    if fields.get("thinking", dict, {}):
        yield "thinking"
    if "effort" in Fields(fields.get("output_config", dict, {}), "output_config"):
        yield "output_config.effort"


def _turn(given: Any, at: str) -> Iterator[Message]:
    """Yield the messages of one turn: each result of a tool is its own message, in order."""
    fields = Fields(given, at)
    role = fields.required("role", str)
    if role not in _ROLES:
        raise fields.refused("role", f"{role!r} is not one of {', '.join(_ROLES)}")
    content = fields.raw("content")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of_parts(content, f"{at}.content")}
    elif role == "assistant":
        yield _assistant(content, f"{at}.content")
    else:
        yield from _results_and_text(role, content, f"{at}.content")


def _assistant(blocks: Sequence[Any], at: str) -> Message:
    texts, calls = [], []
    for index, block in enumerate(blocks):
        place = f"{at}[{index}]"
        fields = Fields(block, place)
        kind = fields.required("type", str)
        if kind == "tool_use":
            made = fields.raw("input") or {}
            calls.append(tool_call(fields.required("id", str), fields.required("name", str), made, f"{place}.input"))
        elif kind not in _THOUGHTS:
            texts.append(text_of_part(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _results_and_text(role: str, blocks: Sequence[Any], at: str) -> Iterator[Message]:
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{at}[{index}]"
        fields = Fields(block, place)
        if fields.required("type", str) != "tool_result":
            texts.append(text_of_part(block, place))
            continue
        if texts:
            yield {"role": role, "content": "".join(texts)}
            texts = []
        said = text_of_parts(fields.raw("content"), f"{place}.content")
        # chat templates have no place for the flag
        if fields.get("is_error", bool, False) and not said.lower().startswith("error"):
            said = f"Error: {said}" if said else "Error"
        yield {"role": "tool", "content": said, "tool_call_id": fields.required("tool_use_id", str)}
    if texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """The content of an answer; an empty text if the policy said nothing, as clients read the first block."""
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in choice.tool_calls
        if not call.error
    ]
    blocks: list[dict[str, Any]] = []
    if choice.thoughts:
        blocks.append({"type": "thinking", "thinking": choice.thoughts, "signature": ""})
    if choice.text or not calls:
        blocks.append({"type": "text", "text": choice.text})
    return [*blocks, *calls]


def _stop_reason(choice: Choice) -> str:
    if choice.stop_string:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish_reason]


def _deltas(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """A block as it begins, and what is added to it."""
    match block["type"]:
        case "tool_use":
            written = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
        case _:
            said = [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
            return {**block, "text": ""}, said


def _event(kind: str, **data: Any) -> Event:
    return Event({"type": kind, **data}, kind)


def _usage(answer: Answer) -> Mapping[str, Any]:
    """The numbers of tokens: those of the input are without the ones that were cached."""
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "output_tokens": answer.num_sampled,
    }
