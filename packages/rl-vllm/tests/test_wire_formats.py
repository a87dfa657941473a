"""The endpoint of agents beside vLLM's server: the same requests and answers, read by the classes of both.

Only the classes are imported; no server and no engine is started.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import numpy as np
import openai.types.responses as openai_types
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.entrypoints.anthropic import protocol as anthropic_protocol
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion import protocol as chat_protocol
from vllm.entrypoints.openai.completion import protocol as completion_protocol
from vllm.entrypoints.openai.responses import protocol as responses_protocol
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from rl_algos.agents.calls import CallRefused, ModelAnswer, ModelChoice
from rl_algos.agents.dialects.completions import ChatCompletions, Completions
from rl_algos.agents.dialects.messages import Messages
from rl_algos.agents.dialects.responses import Responses
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.rollout import Completion, WeightSpan

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NESTED = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": False}
OF_ANTHROPIC = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Hi"}

CHAT = {
    "model": "m",
    "messages": [USER],
    "tools": [NESTED],
    "logprobs": True,
    "n": 2,
    "max_completion_tokens": 9,
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "stream": True,
}
RESPONSES = {
    "model": "m",
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "Hi"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": "4"},
    ],
    "instructions": "Add.",
    "tools": [FLAT],
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 9,
    "stream": True,
}
MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "4"},
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
    "tools": [OF_ANTHROPIC],
    "tool_choice": {"type": "auto"},
    "max_tokens": 9,
    "stop_sequences": ["x"],
    "stream": True,
}
TEXT = {"model": "m", "prompt": "Hi", "logprobs": 1, "max_tokens": 9, "stop": "x", "n": 2, "stream": True}

MADE = (ToolCall("add", {"a": 1}, id="0a1b2c3d4"), ToolCall("add", {}, id="1a1b2c3d4"))


def choice(text: str, thoughts: str = "", calls: tuple[ToolCall, ...] = (), reason: str = "stop") -> ModelChoice:
    sampled = Completion(np.arange(2, dtype=np.int32), np.array([-0.5, -1], np.float32), "stop", (WeightSpan(1, 2),))
    return ModelChoice(text, thoughts, calls, reason, sampled, ("H", "i"))


CHOICES = {
    "text": choice("Hi"),
    "everything": choice("Hi", "Hm.", MADE, "tool_calls"),
    "only calls": choice("", "", MADE[:1], "tool_calls"),
    "nothing, cut": choice("", reason="length"),
}


def answer(given: ModelChoice, num_choices: int = 1) -> ModelAnswer:
    return ModelAnswer("rl-0123456789abcdef", 1000, (given,) * num_choices, 10, 4)


def unknown(model: Any, data: Any, at: str = "") -> Iterator[str]:
    """Yield the paths of what the class that was made of data has no field for."""
    if isinstance(model, BaseModel) and isinstance(data, Mapping):
        names = {field.alias or name: name for name, field in type(model).model_fields.items()}
        names |= {name: name for name in type(model).model_fields}
        for key, value in data.items():
            path = f"{at}.{key}" if at else key
            if key not in names:
                yield path
            else:
                yield from unknown(getattr(model, names[key]), value, path)
    elif isinstance(data, list) and isinstance(model, list | tuple):
        for one, item in zip(model, data, strict=True):
            yield from unknown(one, item, f"{at}[]")


def differences(kind: Any, data: Mapping[str, Any]) -> set[str]:
    """Paths of fields that a class does not know, or that do not have the value that it wants."""
    try:
        model = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        return {".".join(map(str, each["loc"])) + ": " + each["type"] for each in error.errors()}
    return set(unknown(model, data))


THOUGHTS = "reasoning_content"  # the name that agents read; vLLM has renamed it to `reasoning`
CHAT_DIFFERS = {f"choices[].message.{THOUGHTS}", f"choices[].delta.{THOUGHTS}"}
COMPLETION_DIFFERS = {
    # OpenAI's class has null for them; vLLM lists the sampled token once more
    "choices.0.logprobs.top_logprobs: list_type",
    "choices.1.logprobs.top_logprobs: list_type",
}
RESPONSES_DIFFERS = {
    # fields of OpenAI's class that vLLM's does not have
    "error",
    "store",
}
ONLY_OF_VLLM = {
    # the run decides how completions are drawn, and the client is not told
    "temperature": 1.0,
    "top_p": 1.0,
    # what vLLM's class requires and OpenAI's does not
    "background": False,
    "service_tier": "auto",
}


@pytest.mark.parametrize("given", CHOICES.values(), ids=CHOICES)
def test_chat_completions_are_vllms(given):
    dialect = ChatCompletions()
    call = dialect.read(CHAT)
    found = differences(chat_protocol.ChatCompletionResponse, dialect.answer(call, answer(given, 2)))
    for event in dialect.events(call, answer(given, 2)):
        if event.data is not None:
            found |= differences(chat_protocol.ChatCompletionStreamResponse, event.data)
    assert found == (CHAT_DIFFERS if given.thoughts else set())


def test_text_completions_are_vllms():
    dialect = Completions()
    call = dialect.read(TEXT)
    given = answer(CHOICES["text"], 2)
    assert differences(completion_protocol.CompletionResponse, dialect.answer(call, given)) == COMPLETION_DIFFERS
    for event in dialect.events(call, given):
        if event.data is not None:
            found = differences(completion_protocol.CompletionStreamResponse, event.data)
            assert found == {"choices.0.logprobs.top_logprobs: list_type"}


@pytest.mark.parametrize("given", CHOICES.values(), ids=CHOICES)
def test_responses_are_vllms_and_openais(given):
    dialect = Responses()
    call = dialect.read(RESPONSES)
    body = dialect.answer(call, answer(given))
    assert differences(responses_protocol.ResponsesResponse, {**body, **ONLY_OF_VLLM}) == RESPONSES_DIFFERS
    assert differences(openai_types.Response, body) == {"store"}
    kinds = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in event_classes()}
    for event in dialect.events(call, answer(given)):
        data = dict(event.data)
        if "response" in data and "incomplete" not in event.name:
            data["response"] = {**data["response"], **ONLY_OF_VLLM}
        found = differences(kinds[event.name], data)
        allowed = {f"response.{name}" for name in (RESPONSES_DIFFERS if "response" in data else ())}
        if "incomplete" in event.name:
            allowed = {"response.store"}  # vLLM has no class of its own for it
        # clients of older versions read the name here; it was dropped from OpenAI's class
        allowed |= {"name"} if event.name == "response.function_call_arguments.done" else set()
        # the logprobs of deltas have no bytes in OpenAI's class
        allowed |= {"logprobs[].bytes"} if data.get("logprobs") else set()
        assert found == allowed, event.name


def event_classes() -> Iterator[type[BaseModel]]:
    """Yield the classes of events: OpenAI's, and those of vLLM in place of them."""
    for module in (openai_types, responses_protocol):
        for name, kind in vars(module).items():
            if name.endswith("Event") and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield kind


@pytest.mark.parametrize("given", CHOICES.values(), ids=CHOICES)
def test_messages_are_vllms(given):
    dialect = Messages()
    call = dialect.read(MESSAGES)
    assert differences(anthropic_protocol.AnthropicMessagesResponse, dialect.answer(call, answer(given))) == set()
    for event in dialect.events(call, answer(given)):
        assert differences(anthropic_protocol.AnthropicStreamEvent, event.data) == set(), event.name


def test_errors_are_vllms():
    refused = CallRefused("no", param="input")
    # vLLM repeats the status; OpenAI has a name
    assert differences(ErrorResponse, Responses().error(refused)) == {"error.code: int_parsing"}
    assert differences(anthropic_protocol.AnthropicErrorResponse, Messages().error(refused)) == set()


def plain(messages: Any) -> list[Mapping[str, Any]]:
    """Messages with empty content in place of none, and arguments as objects."""
    told = []
    for message in json.loads(json.dumps(messages)):
        for made in message.get("tool_calls", ()):
            written = made["function"]["arguments"]
            made["function"]["arguments"] = json.loads(written) if isinstance(written, str) else written
        role = "system" if message["role"] == "developer" else message["role"]
        told.append({**message, "role": role, "content": message.get("content") or ""})
    return told


def test_the_items_of_a_response_are_the_messages_that_vllm_makes_of_them():
    theirs = responses_protocol.ResponsesRequest.model_validate(json.loads(json.dumps(RESPONSES)))
    made = construct_input_messages(request_instructions=theirs.instructions, request_input=theirs.input)
    ours = Responses().read(RESPONSES)
    assert plain(ours.messages) == [{k: v for k, v in each.items() if k != "type"} for each in plain(made)]
    assert (ours.max_new_tokens, ours.is_streamed, ours.is_stored) == (
        theirs.max_output_tokens,
        theirs.stream,
        theirs.store,
    )
    assert ours.wants_logprobs == theirs.is_include_output_logprobs()


def test_the_blocks_of_messages_are_the_messages_that_vllm_makes_of_them():
    theirs = AnthropicServingMessages.to_chat_completion_request(
        anthropic_protocol.AnthropicMessagesRequest.model_validate(MESSAGES)
    )
    ours = Messages().read(MESSAGES)
    made = json.loads(theirs.model_dump_json(exclude_unset=True))
    assert plain(ours.messages) == plain(made["messages"])
    assert [tool["function"]["name"] for tool in ours.tools] == [tool["function"]["name"] for tool in made["tools"]]
    assert [tool["function"]["parameters"] for tool in ours.tools] == [SCHEMA]
    assert (ours.max_new_tokens, list(ours.stop_strings)) == (made["max_completion_tokens"], made["stop"])


def test_the_requests_of_chat_and_text_completions_are_vllms():
    chat = chat_protocol.ChatCompletionRequest.model_validate(CHAT)
    ours = ChatCompletions().read(CHAT)
    assert (ours.max_new_tokens, ours.num_choices, list(ours.stop_strings)) == (9, chat.n, chat.stop)
    assert (ours.wants_logprobs, ours.wants_usage) == (chat.logprobs, chat.stream_options.include_usage)
    text = completion_protocol.CompletionRequest.model_validate(TEXT)
    assert (Completions().read(TEXT).text, Completions().read(TEXT).num_choices) == (text.prompt, text.n)
