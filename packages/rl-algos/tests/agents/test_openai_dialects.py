import json

import pytest
from dialect_answers import MADE, answer, choice

from rl_algos.agents.calls import CallRefused, ModelCall, StreamEvent
from rl_algos.agents.dialects.completions import ChatCompletions, Completions
from rl_algos.agents.dialects.responses import Responses

CHAT, TEXT, RESPONSES = ChatCompletions(), Completions(), Responses()
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}


def read(*messages, **fields):
    return CHAT.read({"model": "m", "messages": list(messages or (USER,)), **fields})


def read_text(**fields):
    return TEXT.read({"model": "m", "prompt": "Hi", **fields})


def test_fields_of_chat_completions_are_read():
    call = read(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"},
        tools=[{"type": "function", "function": {"name": "add"}}],
        tool_choice="none",
        max_tokens=5,
        max_completion_tokens=7,
        stop="x",
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.3,
        response_format={"type": "text"},
    )
    assert call == ModelCall(
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "a", "name": "Ann"}),
        tools=({"type": "function", "function": FUNCTION},),
        reads_calls=False,
        max_new_tokens=7,
        stop_strings=("x",),
        num_choices=2,
        wants_logprobs=True,
        is_streamed=True,
        wants_usage=True,
        model="m",
        ignored=("temperature",),
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "is empty"),
        ({"messages": None}, "messages", "is missing"),
        ({"messages": [{"role": "critic"}]}, "messages[0].role", "'critic' is not one of"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
            "is missing",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema with a schema"),
        ({"top_logprobs": 5}, "top_logprobs", "logprobs=true"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "remove it"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"echo": True}, "echo", "use /v1/completions"),
        ({"n": 17}, "n", "from 1 to 16, got 17"),
        ({"n": True}, "n", "an integer, got true"),
        ({"stop": [""]}, "stop", "list of strings"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "pass functions only"),
        ({"tool_choice": "never"}, "tool_choice", "pass auto or none"),
    ],
)
def test_what_chat_completions_cannot_serve_is_refused_by_name(fields, param, message):
    with pytest.raises(CallRefused) as refused:
        read(**fields)
    assert refused.value.param == param
    assert message in str(refused.value)
    assert CHAT.error(refused.value)["error"] == {
        "message": str(refused.value),
        "type": "invalid_request_error",
        "param": param,
        "code": "invalid_request",
    }


def test_forced_calls_are_a_form_of_the_answer():
    add, sub = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))
    for forced, names in (("required", ["add", "sub"]), (sub, ["sub"]), ("auto", None), ("none", None)):
        call = read(tools=[add, sub], tool_choice=forced)
        assert (call.form is None) == (names is None)
        if call.form is not None:
            assert call.form.must_call
            assert [tool["function"]["name"] for tool in json.loads(call.form.tools)] == names
            assert call.form_fields == ("tool_choice",)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_allowed_tools_are_the_ones_that_the_policy_sees(dialect, mode):
    nested = dialect is CHAT

    def tool(name):
        return {"type": "function", **({"function": {"name": name}} if nested else {"name": name})}

    def call(*names):
        allowed = {"mode": mode, "tools": [tool(name) for name in names]}
        choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
        return dialect.read(
            {"messages": [USER], "input": "Hi", "tools": [tool("add"), tool("sub")], "tool_choice": choice}
        )

    assert [each["function"]["name"] for each in call("sub").tools] == ["sub"]
    assert call("sub").form_fields == (("tool_choice",) if mode == "required" else ())
    with pytest.raises(CallRefused, match="'mul', which is not one of the tools"):
        call("mul")


@pytest.mark.parametrize("stop", [["x"] * 65, "x" * 257])
def test_stop_strings_are_few_and_short(stop):
    with pytest.raises(CallRefused, match="maximum of 64 strings of 256 characters"):
        read(stop=stop)


def test_a_message_does_not_repeat_a_request():
    with pytest.raises(CallRefused) as refused:
        read({"role": "x" * 100_000, "content": "Hi"})
    assert len(str(refused.value)) < 1100


def test_arguments_that_are_nested_too_deeply_stay_text():
    deep = "[" * 100_000
    made = {"id": "1", "type": "function", "function": {"name": "add", "arguments": deep}}
    _, turn = read(USER, {"role": "assistant", "content": None, "tool_calls": [made]}).messages
    assert turn["tool_calls"][0]["function"]["arguments"] == {"arguments": deep}


def test_a_stream_of_chat_chunks_has_the_role_first_and_the_usage_last():
    call = read(stream=True, stream_options={"include_usage": True})
    *events, usage, mark = CHAT.events(call, answer(choice("Hi.", "Hm.", MADE, "tool_calls")))
    deltas = [event.data["choices"][0]["delta"] for event in events]
    assert deltas[:3] == [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm."}, {"content": "Hi."}]
    calls = [delta["tool_calls"][0] for delta in deltas[3:5]]
    assert [(made["index"], made["id"]) for made in calls] == [(0, "0a1b2c3d4"), (1, "1a1b2c3d4")]
    assert [event.data["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["tool_calls"]
    assert (usage.data["choices"], usage.data["usage"]["total_tokens"], mark) == ([], 13, StreamEvent(None))


@pytest.mark.parametrize("given", [choice("Hi."), choice("", "Hm.", MADE, "tool_calls"), choice("")])
def test_an_echoed_answer_is_the_turn_that_was_answered(given):
    body = json.loads(json.dumps(CHAT.answer(read(), answer(given))))
    echoed = body["choices"][0]["message"]
    assert echoed["content"] == (given.text or (None if given.tool_calls else ""))
    _, turn = read(USER, echoed).messages
    made = [
        {"type": "function", "id": each.id, "function": {"name": each.name, "arguments": each.arguments}}
        for each in given.tool_calls
    ]
    assert turn == {"role": "assistant", "content": given.text, **({"tool_calls": made} if made else {})}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_completions_cannot_serve_is_refused_by_name(fields, param):
    with pytest.raises(CallRefused) as refused:
        read_text(**fields)
    assert refused.value.param == param


def test_a_text_completion_has_the_offsets_of_its_tokens():
    call = read_text(logprobs=1, n=2)
    given = answer(*[choice("ab<e>", pieces=("a", "b", "<e>"))] * 2)
    body = TEXT.answer(call, given)
    assert [each["logprobs"]["text_offset"] for each in body["choices"]] == [[0, 1, 2]] * 2
    *events, mark = TEXT.events(call, given)
    assert [event.data["choices"][0]["index"] for event in events] == [0, 1]
    assert mark == StreamEvent(None)
