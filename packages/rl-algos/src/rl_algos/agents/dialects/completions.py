"""OpenAI's Chat Completions, `POST /v1/chat/completions`, and text completions, `POST /v1/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from rl_algos.agents.calls import COMMENT, CallRefused, ModelAnswer, ModelCall, ModelChoice, StreamEvent
from rl_algos.agents.fields import MAX_CHOICES, Fields, content_of, conversation, text_of_parts, tool_call
from rl_core.rollouts.rollout import Message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(refused: CallRefused) -> Mapping[str, Any]:
    """Return the JSON body of an error as OpenAI's clients read it."""
    kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param or None, "code": refused.code}}


class ChatCompletions:
    """The dialect of `client.chat.completions.create`."""

    heartbeat = COMMENT
    error = staticmethod(openai_error)

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call that a request asks for."""
        fields = Fields(body)
        fields.refuse_others_than("top_logprobs", [0], "the logprobs of the sampled tokens are: logprobs=true")
        fields.refuse_others_than("logit_bias", [{}], "it would change what is sampled; remove it")
        fields.refuse_others_than("modalities", [["text"]], "this policy writes text only")
        fields.refuse_others_than("echo", [False], "use /v1/completions")
        given = enumerate(fields.required("messages", list))
        messages = conversation(_message(each, f"messages[{index}]") for index, each in given)
        limit = fields.number("max_completion_tokens", 1)
        form = "response_format"
        return ModelCall(
            messages=messages,
            max_new_tokens=fields.number("max_tokens", 1) if limit is None else limit,
            wants_logprobs=fields.get("logprobs", bool, False),
            ignored=fields.sampling_set_by_client(),
            **fields.formed(form, fields.answer_format(form), fields.get("tools", list, [])),
            **_common(fields),
        )

    def answer(self, call: ModelCall, answer: ModelAnswer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        choices = []
        for index, choice in enumerate(answer.choices):
            message = {"role": "assistant", **_spoken(choice)}
            logprobs, reason = _chat_logprobs(call, choice), choice.finish_reason
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return {**_head(call, answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """Yield the chunks of a streamed answer: for each choice its role, its content, and its end."""
        head = _head(call, answer, "chat.completion.chunk")

        def chunk(index: int, delta: Mapping[str, Any], logprobs: Any = None, reason: str | None = None) -> StreamEvent:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return StreamEvent({**head, "choices": [choice]})

        for index, choice in enumerate(answer.choices):
            yield chunk(index, {"role": "assistant", "content": ""})
            spoken = _spoken(choice)
            if thoughts := spoken.get("reasoning_content"):
                yield chunk(index, {"reasoning_content": thoughts})
            if spoken["content"]:
                yield chunk(index, {"content": spoken["content"]}, _chat_logprobs(call, choice))
            for number, made in enumerate(spoken.get("tool_calls", ())):
                yield chunk(index, {"tool_calls": [{"index": number, **made}]})
            yield chunk(index, {}, reason=choice.finish_reason)
        if call.wants_usage:
            yield StreamEvent({**head, "choices": [], "usage": _usage(answer)})
        yield StreamEvent(None)


class Completions:
    """The dialect of `client.completions.create`: a string that is continued as it is."""

    heartbeat = COMMENT
    error = staticmethod(openai_error)

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Return the call that a request asks for."""
        fields = Fields(body)
        prompts = fields.strings("prompt")
        if len(prompts) != 1:
            raise fields.refused("prompt", f"must be one string, got {len(prompts)}")
        fields.refuse_others_than("echo", [False], "the answer has what was sampled only")
        fields.refuse_others_than("suffix", [""], "the text is continued at its end")
        fields.refuse_others_than("best_of", [1], "use n")
        fields.refuse_others_than("logit_bias", [{}], "it would change what is sampled; remove it")
        fields.refuse_others_than("logprobs", [0, 1], "the logprobs of the sampled tokens are: logprobs=1")
        return ModelCall(
            text=prompts[0],
            max_new_tokens=fields.number("max_tokens", 1),
            wants_logprobs="logprobs" in fields,
            ignored=fields.sampling_set_by_client(),
            **_common(fields),
        )

    def answer(self, call: ModelCall, answer: ModelAnswer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        choices = []
        for index, choice in enumerate(answer.choices):
            logprobs: dict[str, Any] | None = None
            if call.wants_logprobs:
                offsets = list(accumulate(map(len, choice.pieces[:-1]), initial=0)) if choice.pieces else []
                logprobs = {"tokens": list(choice.pieces), "token_logprobs": choice.completion.logprobs.tolist()}
                logprobs |= {"top_logprobs": None, "text_offset": offsets}
            made = {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            choices.append(made)
        return {**_head(call, answer, "text_completion"), "choices": choices, "usage": _usage(answer)}

    def events(self, call: ModelCall, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """Yield the chunks of a streamed answer, one for each choice."""
        whole = self.answer(call, answer)
        head = _head(call, answer, "text_completion")
        for choice in whole["choices"]:
            yield StreamEvent({**head, "choices": [choice]})
        if call.wants_usage:
            yield StreamEvent({**head, "choices": [], "usage": whole["usage"]})
        yield StreamEvent(None)


def _common(fields: Fields) -> dict[str, Any]:
    """Return the arguments of a call that both kinds of requests have."""
    return {
        "stop_strings": fields.stop_strings("stop"),
        "num_choices": fields.number("n", 1, MAX_CHOICES) or 1,
        "is_streamed": fields.get("stream", bool, False),
        "wants_usage": fields.section("stream_options").get("include_usage", bool, False),
        "model": fields.get("model", str, ""),
    }


def _usage(answer: ModelAnswer) -> Mapping[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def _head(call: ModelCall, answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": call.model}


def _message(given: Any, at: str) -> Message:
    fields = Fields(given, at)
    message: dict[str, Any] = {"role": fields.role(_ROLES)}
    read = content_of if message["role"] in ("user", "tool") else text_of_parts
    message["content"] = read(fields.raw("content"), f"{at}.content")
    if name := fields.get("name", str, ""):
        message["name"] = name
    if message["role"] == "tool":
        message["tool_call_id"] = fields.required("tool_call_id", str)
    for index, each in enumerate(fields.get("tool_calls", list, [])):
        place = f"{at}.tool_calls[{index}]"
        call = Fields(each, place)
        function = Fields(call.required("function", dict), f"{place}.function")
        name, arguments = function.required("name", str), function.raw("arguments") or ""
        message.setdefault("tool_calls", []).append(tool_call(call.get("id", str, ""), name, arguments, place))
    return message


def _spoken(choice: ModelChoice) -> dict[str, Any]:
    calls = []
    for call in choice.readable_calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        calls.append({"id": call.id, "type": "function", "function": function})
    spoken: dict[str, Any] = {"content": choice.text or (None if calls else "")}
    if choice.thoughts:
        spoken["reasoning_content"] = choice.thoughts
    return {**spoken, "tool_calls": calls} if calls else spoken


def logprobs_of_tokens(choice: ModelChoice) -> list[dict[str, Any]]:
    """Return the logprob of each sampled token, as Chat Completions and Responses list them."""
    tokens = zip(choice.pieces, choice.completion.logprobs.tolist(), strict=True)
    return [{"token": text, "logprob": p, "bytes": list(text.encode()), "top_logprobs": []} for text, p in tokens]


def _chat_logprobs(call: ModelCall, choice: ModelChoice) -> Mapping[str, Any] | None:
    return {"content": logprobs_of_tokens(choice)} if call.wants_logprobs else None
