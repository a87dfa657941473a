import json

import pytest
from dialect_answers import MADE, answer, choice

from rl_algos.agents.calls import CallRefused, ModelCall
from rl_algos.agents.dialects.responses import Responses

DIALECT = Responses()
TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
READ_TOOL = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}


def read(**fields):
    return DIALECT.read({"model": "m", "input": "Hi", **fields})


def test_a_string_is_a_message_of_the_user():
    assert read() == ModelCall(
        messages=({"role": "user", "content": "Hi"},), model="m", wants_usage=True, is_stored=True
    )


def test_fields_are_read():
    call = read(
        instructions="Be brief.",
        tools=[{**TOOL, "strict": True}],
        tool_choice="none",
        max_output_tokens=7,
        stream=True,
        store=False,
        previous_response_id="rl-1",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
        truncation="disabled",
        metadata={"a": "b"},
    )
    assert call == ModelCall(
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}),
        tools=(READ_TOOL,),
        reads_calls=False,
        max_new_tokens=7,
        wants_logprobs=True,
        is_streamed=True,
        wants_usage=True,
        model="m",
        continues="rl-1",
        num_instructions=1,
        is_stored=False,
    )


def test_items_are_messages_and_a_turn_has_its_calls():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "2", "name": "add", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call", "call_id": "3", "name": "add", "arguments": "{}"},
    ]

    def made(id, arguments):
        return {"type": "function", "id": id, "function": {"name": "add", "arguments": arguments}}

    assert read(input=items).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [made("1", {"a": 1}), made("2", {})]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "tool_calls": [made("3", {})]},
    )


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"temperature": 0, "top_p": 1}, ("temperature", "top_p")),
        ({"tool_choice": "required"}, ("tool_choice",)),
        ({"tool_choice": {"type": "function", "name": "add"}}, ("tool_choice",)),
        ({"parallel_tool_calls": False}, ("parallel_tool_calls",)),
        ({"parallel_tool_calls": True}, ()),
        ({"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}, ("reasoning", "text.verbosity")),
    ],
)
def test_what_only_the_policy_decides_is_listed(fields, ignored):
    call = read(**fields)
    assert (*call.ignored, *call.form_fields) == ignored


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "is missing"),
        ({"input": []}, "input", "is empty"),
        ({"input": 3}, "input", "a list, got 3"),
        ({"input": [3]}, "input[0]", "must be an object, got 3"),
        ({"input": [{"content": "x"}]}, "input[0].role", "is missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool' is not one of system, developer"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            "pass text, and images",
        ),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "'item_reference' is not offered"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id", "is missing"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name", "is missing"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "is missing"),
        ({"instructions": 3}, "instructions", "a string, got 3"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"web_search" is not offered; pass functions only'),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type", '"custom" is not offered'),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools", "is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
        ({"background": True}, "background", "true is not offered"),
        ({"conversation": "c"}, "conversation", "pass previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "pass instructions and input"),
        ({"truncation": "auto"}, "truncation", "in the agent"),
        ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "is not offered"),
        ({"include": ["file_search_call.results"]}, "include", "'file_search_call.results' is not offered"),
        ({"stream": "yes"}, "stream", 'a boolean, got "yes"'),
        ({"previous_response_id": 3}, "previous_response_id", "a string, got 3"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param, message):
    with pytest.raises(CallRefused) as refused:
        read(**fields)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert message in str(refused.value)
    assert DIALECT.error(refused.value)["error"]["param"] == param


def test_an_answer_has_thoughts_text_and_calls():
    call = read(instructions="Be brief.", tools=[TOOL], max_output_tokens=9)
    body = DIALECT.answer(call, answer(choice("Hi.", "Hm.", MADE, "tool_calls")))
    assert body["output"] == [
        {
            "type": "reasoning",
            "id": "rs_rl-0123456789abcdef",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "status": "completed",
        },
        {
            "type": "message",
            "id": "msg_rl-0123456789abcdef",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}],
            "status": "completed",
        },
        *[
            {
                "type": "function_call",
                "id": f"fc_{made.id}",
                "call_id": made.id,
                "name": "add",
                "arguments": json.dumps(made.arguments, ensure_ascii=False),
                "status": "completed",
            }
            for made in MADE
        ],
    ]
    assert (body["id"], body["created_at"], body["status"]) == ("rl-0123456789abcdef", 1000, "completed")
    assert (body["instructions"], body["max_output_tokens"], body["incomplete_details"]) == ("Be brief.", 9, None)
    assert body["tools"] == [{**TOOL, "strict": False}]
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_an_answer_that_met_a_limit_is_incomplete():
    body = DIALECT.answer(read(), answer(choice("", reason="length")))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["incomplete"]
    *_, last = DIALECT.events(read(stream=True), answer(choice("", reason="length")))
    assert (last.name, last.data["response"]) == ("response.incomplete", body)


def test_logprobs_are_listed_if_they_are_asked_for():
    call = read(include=["message.output_text.logprobs"])
    [item] = DIALECT.answer(call, answer(choice("ab", pieces=("a", "b", "<e>"))))["output"]
    assert [(each["token"], each["logprob"]) for each in item["content"][0]["logprobs"]] == [
        ("a", -0.5),
        ("b", -0.5),
        ("<e>", -0.5),
    ]


def test_a_stream_begins_and_ends_each_item_and_counts_its_events():
    call, given = read(tools=[TOOL], stream=True), answer(choice("Hi.", "Hm.", MADE[:1], "tool_calls"))
    events = list(DIALECT.events(call, given))
    assert [event.name for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.data["type"] for event in events] == [event.name for event in events]
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1].data["response"] == DIALECT.answer(call, given)
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert done == DIALECT.answer(call, given)["output"]
    assert [event.data["output_index"] for event in events if "output_index" in event.data] == [0] * 6 + [1] * 6 + [
        2
    ] * 4


def test_an_echoed_answer_is_the_turn_that_was_answered():
    given = answer(choice("Hi.", "Hm.", MADE, "tool_calls"))
    *_, turn = read(input=[{"role": "user", "content": "Hi"}, *DIALECT.answer(read(), given)["output"]]).messages
    assert turn == {
        "role": "assistant",
        "content": "Hi.",
        "tool_calls": [
            {"type": "function", "id": made.id, "function": {"name": made.name, "arguments": made.arguments}}
            for made in MADE
        ],
    }
