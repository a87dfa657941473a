import json

import pytest
from dialect_answers import MADE, answer, choice

from rl_algos.agents.calls import CallRefused, ModelCall
from rl_algos.agents.dialects.messages import PREFILL, Messages

DIALECT = Messages()
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}


def read(*messages, **fields):
    return DIALECT.read({"model": "m", "max_tokens": 9, "messages": list(messages or (USER,)), **fields})


def test_fields_are_read():
    call = read(
        system=[
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "none"},
        stop_sequences=["x"],
        stream=True,
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert call == ModelCall(
        messages=({"role": "system", "content": "Be brief."}, USER),
        tools=(
            {
                "type": "function",
                "function": {"name": "add", "description": "Add.", "parameters": TOOL["input_schema"]},
            },
        ),
        reads_calls=False,
        max_new_tokens=9,
        stop_strings=("x",),
        is_streamed=True,
        wants_usage=True,
        model="m",
    )
    assert read(system="Be brief.").messages == call.messages


def test_a_block_that_differs_in_each_call_is_not_part_of_the_instructions():
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "Be brief.")]
    assert read(system=blocks) == read(system="Be brief.")


def test_blocks_are_messages_and_each_result_is_one():
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "3"},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "4"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "0"},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    assert read(*turns).messages == (
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [
                {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}},
                {"type": "function", "id": "2", "function": {"name": "add", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "2"},
        {"role": "tool", "content": "Error: 4", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "0"},
        {"role": "user", "content": "d"},
    )


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"temperature": 1.0, "top_k": 5}, ("temperature", "top_k")),
        ({"tool_choice": {"type": "auto"}}, ()),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, (PREFILL,)),
        ({"tool_choice": {"type": "any"}}, ("tool_choice",)),
        ({"tool_choice": {"type": "tool", "name": "add"}}, ("tool_choice",)),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("tool_choice.disable_parallel_tool_use",),
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}},
            ("thinking", "output_config.effort"),
        ),
    ],
)
def test_what_only_the_policy_decides_is_listed(fields, ignored):
    call = read(**fields)
    assert (*call.ignored, *call.form_fields) == ignored


def of_user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "Hi"}, "messages", 'a list, got "Hi"'),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool' is not one of user, assistant"),
        (of_user({"type": "image", "source": {}}), "messages[0].content[0].source.data", "is missing"),
        (of_user({"text": "x"}), "messages[0].content[0].type", "is missing"),
        (of_user({"type": "tool_result"}), "messages[0].content[0].tool_use_id", "is missing"),
        (
            of_user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document"}]}),
            "messages[0].content[0].content[0].type",
            "pass text, and images",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "server_tool_use"}]}
                ]
            },
            "messages[0].content[1].type",
            "'server_tool_use' is not offered",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": [1]}]}
                ]
            },
            "messages[0].content[0].input",
            "arguments must be an object, got [1]",
        ),
        ({"system": 3}, "system", "a string or a list of parts, got 3"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "pass functions only"),
        ({"tool_choice": {"type": "best"}}, "tool_choice", "pass auto or none"),
        ({"stop_sequences": [3]}, "stop_sequences", "list of strings, got [3]"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers", "call the servers in the agent"),
        ({"container": "c"}, "container", "in the agent"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format", "is not offered"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
            "'clear_tool_uses_20250919' is not offered",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param, message):
    with pytest.raises(CallRefused) as refused:
        read(**fields)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (500, "api_error"),
    ],
)
def test_errors_are_anthropics(status, kind):
    error = DIALECT.error(CallRefused("no", status=status))
    assert error == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_an_answer_has_thoughts_text_and_calls():
    body = DIALECT.answer(read(), answer(choice("Hi.", "Hm.", MADE, "tool_calls")))
    assert body == {
        "id": "rl-0123456789abcdef",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Hi."},
            *[{"type": "tool_use", "id": made.id, "name": "add", "input": made.arguments} for made in MADE],
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
        },
    }


@pytest.mark.parametrize(
    ("given", "reason", "stop"),
    [
        (choice(), "end_turn", None),
        (choice(reason="length"), "max_tokens", None),
        (choice(calls=MADE, reason="tool_calls"), "tool_use", None),
        (choice(stop="x"), "stop_sequence", "x"),
    ],
)
def test_the_reason_for_the_end_is_given(given, reason, stop):
    body = DIALECT.answer(read(), answer(given))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)


def test_an_empty_answer_has_a_block():
    assert DIALECT.answer(read(), answer(choice("")))["content"] == [{"type": "text", "text": ""}]


def test_a_stream_begins_and_ends_each_block():
    given = answer(choice("Hi.", "Hm.", MADE[:1], "tool_calls"))
    events = list(DIALECT.events(read(stream=True), given))
    assert all(event.name == event.data["type"] for event in events)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event.name for event in events] == [
        "message_start",
        *block[:2],
        *block[1:],
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
    whole = DIALECT.answer(read(), given)
    start = events[0].data["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    deltas = [event.data["delta"] for event in events if event.name == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "Hm."},
        {"type": "signature_delta", "signature": ""},
        {"type": "text_delta", "text": "Hi."},
        {"type": "input_json_delta", "partial_json": json.dumps(MADE[0].arguments, ensure_ascii=False)},
    ]
    assert events[-2].data["usage"] == whole["usage"]
    assert events[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_an_echoed_answer_is_the_turn_that_was_answered():
    given = answer(choice("Hi.", "Hm.", MADE, "tool_calls"))
    echoed = {"role": "assistant", "content": DIALECT.answer(read(), given)["content"]}
    _, turn, _ = read(USER, echoed, USER).messages
    assert turn == {
        "role": "assistant",
        "content": "Hi.",
        "tool_calls": [
            {"type": "function", "id": made.id, "function": {"name": made.name, "arguments": made.arguments}}
            for made in MADE
        ],
    }
