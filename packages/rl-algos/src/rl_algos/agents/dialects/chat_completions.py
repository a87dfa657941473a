"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rl_algos.agents.calls import COMMENT, Answer, Call, CallRefused, Choice, Event
from rl_algos.agents.dialects.openai_errors import openai_error
from rl_algos.agents.fields import MAX_CHOICES, Fields, check_conversation, function_tools, text_of_parts, tool_call
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.rollout import Message

_FREE_TEXT = ({"type": "text"},)
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatCompletions:
    """The dialect of `client.chat.completions.create`."""

    heartbeat = COMMENT

    def read(self, body: Mapping[str, Any]) -> Call:
        """Return the call that a request asks for."""
        fields = Fields(body)
        fields.refuse_others_than(
            "response_format", _FREE_TEXT, "completions are sampled freely; parse and check them in the agent"
        )
        fields.refuse_others_than("top_logprobs", [0], "the logprobs of the sampled tokens are: logprobs=true")
        fields.refuse_others_than("logit_bias", [{}], "it would change what is sampled; remove it")
        fields.refuse_others_than("modalities", [["text"]], "this policy writes text only")
        fields.refuse_others_than("echo", [False], "use /v1/completions")
        given = fields.required("messages", list)
        messages = tuple(_message(each, f"messages[{index}]") for index, each in enumerate(given))
        check_conversation(messages)
        limit = fields.number("max_completion_tokens", 1)
        tools, reads_calls, forced = fields.tool_choice(function_tools(fields.get("tools", list, [])))
        stream = Fields(fields.get("stream_options", dict, {}), "stream_options")
        return Call(
            messages=messages,
            tools=tools,
            reads_calls=reads_calls,
            max_new_tokens=fields.number("max_tokens", 1) if limit is None else limit,
            stop_strings=fields.stop_strings("stop"),
            num_choices=fields.number("n", 1, MAX_CHOICES) or 1,
            wants_logprobs=fields.get("logprobs", bool, False),
            is_streamed=fields.get("stream", bool, False),
            wants_usage=stream.get("include_usage", bool, False),
            model=fields.get("model", str, ""),
            ignored=(*fields.sampling_set_by_client(), *forced),
        )

    def answer(self, call: Call, answer: Answer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **_said(choice)},
                "logprobs": _logprobs(call, choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**_head(call, answer, "chat.completion"), "choices": choices, "usage": usage(answer)}

    def events(self, call: Call, answer: Answer) -> Iterator[Event]:
        """Yield the chunks of a streamed answer: for each choice its role, what it says, and its end."""
        head = _head(call, answer, "chat.completion.chunk")

        def chunk(index: int, delta: Mapping[str, Any], logprobs: Any = None, reason: str | None = None) -> Event:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return Event({**head, "choices": [choice]})

        for index, choice in enumerate(answer.choices):
            yield chunk(index, {"role": "assistant", "content": ""})
            said = _said(choice)
            if thoughts := said.get("reasoning_content"):
                yield chunk(index, {"reasoning_content": thoughts})
            if said["content"]:
                yield chunk(index, {"content": said["content"]}, _logprobs(call, choice))
            for number, made in enumerate(said.get("tool_calls", ())):
                yield chunk(index, {"tool_calls": [{"index": number, **made}]})
            yield chunk(index, {}, reason=choice.finish_reason)
        if call.wants_usage:
            yield Event({**head, "choices": [], "usage": usage(answer)})
        yield Event(None)

    def error(self, refused: CallRefused) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai_error(refused)


def usage(answer: Answer) -> Mapping[str, Any]:
    """Return the numbers of tokens of an answer, as OpenAI's chat and text completions report them."""
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def _head(call: Call, answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": call.model}


def _message(given: Any, at: str) -> Message:
    fields = Fields(given, at)
    role = fields.required("role", str)
    if role not in _ROLES:
        raise fields.refused("role", f"{role!r} is not one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text_of_parts(fields.raw("content"), f"{at}.content"),
    }
    if name := fields.get("name", str, ""):
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.required("tool_call_id", str)
    if calls := fields.get("tool_calls", list, []):
        message["tool_calls"] = [_made(each, f"{at}.tool_calls[{index}]") for index, each in enumerate(calls)]
    return message


def _made(given: Any, at: str) -> dict[str, Any]:
    fields = Fields(given, at)
    function = Fields(fields.required("function", dict), f"{at}.function")
    return tool_call(fields.get("id", str, ""), function.required("name", str), function.raw("arguments") or "", at)


def _said(choice: Choice) -> dict[str, Any]:
    calls = [_written(call) for call in choice.tool_calls if not call.error]
    said: dict[str, Any] = {"content": choice.text or (None if calls else "")}
    if choice.thoughts:
        said["reasoning_content"] = choice.thoughts
    return {**said, "tool_calls": calls} if calls else said


def _written(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprobs(call: Call, choice: Choice) -> Mapping[str, Any] | None:
    if not call.wants_logprobs:
        return None
    tokens = zip(choice.pieces, choice.completion.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in tokens
        ]
    }
