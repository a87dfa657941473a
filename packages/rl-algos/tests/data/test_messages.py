"""Messages of rows as data has them. A case is a line: what the row holds, and what it becomes or why it is refused."""

import json

import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import by_keys
from rl_algos.data.rows.messages import as_messages, as_tools, conversation, refuse_surrogates, without_nulls
from rl_core.errors import DataError

USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
RESULT = {"role": "tool", "name": "sum", "content": "1"}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}


def calling(**call):
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        pytest.param(SAID, SAID, id="text is kept"),
        pytest.param(
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            USER,
            id="text parts are joined [abetlen/llama-cpp-python#2324]",
        ),
        pytest.param({"role": "user", "content": ["h", {"text": "i"}]}, USER, id="parts may be bare text"),
        pytest.param({"role": "user", "content": []}, {"role": "user", "content": ""}, id="no parts are no text"),
        pytest.param(
            {"role": "assistant", "content": [{"text": ""}], "tool_calls": [CALL]},
            calling(**CALL),
            id="parts beside a call [waybarrios/vllm-mlx#84]",
        ),
        pytest.param(
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            calling(**CALL),
            id="null beside a call [ProfSynapse/Synaptic-Tuner#42]",
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": [CALL]},
            calling(**CALL),
            id="no content beside a call [huggingface/speech-to-speech#425]",
        ),
        pytest.param({**SAID, "tool_calls": None, "name": None}, SAID, id="keys without a value are left out"),
        pytest.param({**SAID, "tool_calls": []}, SAID, id="an empty list of calls is none"),
        pytest.param(
            calling(type="function", function={"name": "sum", "arguments": '{"x": 1}'}),
            calling(**CALL),
            id="arguments as JSON text [oumi-ai/oumi#2599]",
        ),
        pytest.param(
            {**SAID, "content": "", "tool_calls": json.dumps([CALL])}, calling(**CALL), id="calls as JSON text"
        ),
        pytest.param(calling(name="sum", arguments={"x": 1}), calling(**CALL), id="a call without its wrapper"),
        pytest.param(
            calling(type="function", function={"name": "sum", "arguments": ""}),
            calling(type="function", function={"name": "sum", "arguments": {}}),
            id="empty arguments",
        ),
        pytest.param({"from": "human", "value": "hi"}, USER, id="ShareGPT [NVIDIA-NeMo/Automodel#2375]"),
        pytest.param({"from": "gpt", "value": "yo", "weight": 0}, {**SAID, "weight": 0}, id="a flag of ShareGPT"),
        *(pytest.param({"role": role, "content": "hi"}, USER, id=role) for role in ("human", "prompter")),
        *(pytest.param({"role": role, "content": "yo"}, SAID, id=role) for role in ("model", "gpt", "ai", "bot")),
        *(
            pytest.param({"role": role, "name": "sum", "content": "1"}, RESULT, id=role)
            for role in ("function", "observation", "tool_response")
        ),
        pytest.param({"role": "user", "parts": [{"text": "h"}, {"text": "i"}]}, USER, id="parts of Gemini"),
        pytest.param(
            {"role": "model", "parts": [{"functionCall": {"name": "sum", "args": {"x": 1}}}]},
            calling(**CALL),
            id="a call of Gemini",
        ),
        pytest.param(
            {"role": "user", "parts": [{"functionResponse": {"name": "sum", "response": 1}, "text": None}]},
            RESULT,
            id="a result of Gemini",
        ),
        *(
            pytest.param({"role": "assistant", "content": content, "function_call": call}, calling(**CALL), id=id)
            for content, call, id in (
                (None, {"name": "sum", "arguments": '{"x": 1}'}, "an older call [modelscope/ms-swift#9875]"),
                ("", {"name": "sum", "arguments": {"x": 1}}, "an older call with an object"),
            )
        ),
        pytest.param(
            {"role": "function_call", "content": '{"name": "sum", "arguments": {"x": 1}}'},
            calling(**CALL),
            id="a call as a role",
        ),
        pytest.param({"role": "assistant", "content": None, "refusal": "yo"}, SAID, id="a refusal is what is said"),
        pytest.param({**SAID, "function_call": None}, SAID, id="no older call"),
    ],
)
def test_a_message_has_one_form_however_it_is_written(message, read):
    assert as_messages([message]) == (read,)
    assert conversation(json.dumps([message])) == (read,)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        pytest.param({"role": "user", "content": [{"type": "video"}]}, "part of type 'video'", id="a video"),
        pytest.param({"role": "user", "content": [{"type": "text"}]}, "part of type 'text'", id="a part without text"),
        pytest.param({"role": "user", "content": [3]}, "part of type 'int'", id="a number as part"),
        pytest.param({"role": "user", "content": {"text": "x"}}, "`content` must be a string", id="an object"),
        pytest.param({"role": "user", "content": None}, "user message has no `content`", id="null of the user"),
        pytest.param({"role": "assistant", "content": None}, "assistant message has no `content`", id="null alone"),
        pytest.param({"role": "User", "content": "x"}, "'User' is not a role; write it as 'user'", id="capitals"),
        pytest.param({"role": "assistant ", "content": "x"}, "write it as 'assistant'", id="white space in a role"),
        pytest.param({"role": "Human", "content": "x"}, "write it as 'user'", id="capitals of another name"),
        pytest.param(
            {"role": "assistant", "content": "", "function_call": {"name": "f"}, "tool_calls": [CALL]},
            "both `function_call` and `tool_calls`",
            id="a call twice",
        ),
        pytest.param({"role": "tool_call", "content": "sum(1)"}, "is not valid JSON", id="a call that is no JSON"),
        pytest.param(
            {"role": "user", "parts": [{"inlineData": {"data": "x"}}]}, "part of type 'text'", id="a file of Gemini"
        ),
        pytest.param(
            {"role": "user", "parts": [{"functionResponse": {"name": "f"}}, {"text": "x"}]},
            "must have no other part",
            id="a result of Gemini beside text",
        ),
        pytest.param(calling(function={"name": "f", "arguments": "{"}), "`arguments` is not valid JSON", id="bad JSON"),
        pytest.param(calling(function={"name": "f", "arguments": [1]}), "must be an object", id="a list of arguments"),
        pytest.param(calling(function={"arguments": {}}), "needs a `function` with a `name`", id="a call of nothing"),
    ],
)
def test_a_message_of_another_form_is_refused_with_the_reason(message, problem):
    with pytest.raises(DataError, match=problem):
        as_messages([message])


def test_calls_in_messages_one_after_another_are_parallel():
    call = {"role": "tool_call", "content": '{"name": "sum", "arguments": {"x": 1}}'}
    [asked, turn, result] = as_messages([USER, call, call, {"role": "tool_response", "content": "1"}])
    assert (asked, turn, result["role"]) == (USER, {**calling(**CALL), "tool_calls": [CALL, CALL]}, "tool")


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "[ ] is a list", '["a"]', "[INST] hi", '[{"a": 1}]', "[" * 100_000, "{}", ""]
)
def test_text_that_is_no_list_of_messages_stays_text(text):
    assert conversation(text) == ({"role": "user", "content": text},)


@pytest.mark.parametrize(
    ("given", "tools"),
    [
        pytest.param(None, (), id="none"),
        pytest.param([TOOL], (TOOL,), id="as OpenAI's API takes them [OpenRLHF/OpenRLHF#1228]"),
        pytest.param([TOOL["function"]], (TOOL,), id="functions alone"),
        pytest.param(json.dumps([TOOL]), (TOOL,), id="JSON text"),
    ],
)
def test_tools_of_a_row_have_one_form(given, tools):
    assert as_tools(given) == tools
    assert by_keys({"messages": [USER, SAID], "tools": given}, DatasetConfig(data_path="a.jsonl")).tools == tools


@pytest.mark.parametrize("given", ["no JSON", {"name": "f"}, [1], [{"type": "function"}], [{"function": {}}]])
def test_tools_of_another_form_are_refused(given):
    with pytest.raises(DataError, match="tool"):
        as_tools(given)


@pytest.mark.parametrize(
    ("row", "rewarded", "learned"),
    [
        pytest.param({"answer": "2"}, "2", "2", id="an answer alone is both"),
        pytest.param({"completion": "1+1=2"}, "1+1=2", "1+1=2", id="a completion alone is both"),
        pytest.param({"completion": "1+1=2", "answer": "2"}, "2", "1+1=2", id="the completion is learned"),
        pytest.param({"response": "1+1=2", "answer": "2"}, "2", "1+1=2", id="the response is learned"),
        pytest.param({"completion": None, "answer": "2"}, "2", "2", id="null is no completion"),
    ],
)
def test_what_is_learned_and_what_is_rewarded(row, rewarded, learned):
    example = by_keys({"prompt": "1+1=", **row}, DatasetConfig(data_path="a.jsonl"))
    assert example.answer == rewarded
    assert (example.answer if example.solution is None else example.solution) == learned


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": "\ud83d"}, id="a prompt [openai/tiktoken#541]"),
        {"answer": "\udc80"},
        pytest.param(
            {"messages": [{"role": "user", "content": "a\ud800b"}]}, id="content [run-llama/llama_index#1764]"
        ),
        {"info": {"deep": [["\udfff"]]}},
        {"\ud83d": 1},
    ],
)
def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(row):
    with pytest.raises(DataError, match="half of a surrogate pair"):
        refuse_surrogates(row)


def test_other_characters_are_not_refused():
    refuse_surrogates({"é": ["\U0001f996", "\x00", "\ufeff", 1, None, True, 1.5]})


def test_fields_that_columnar_files_fill_with_null_are_left_out_at_any_depth():
    filled = {"calls": [{"arguments": {"city": None, "x": 1}}, {"arguments": {"city": "Oslo", "x": None}}], "n": None}
    assert without_nulls(filled) == {"calls": [{"arguments": {"x": 1}}, {"arguments": {"city": "Oslo"}}]}
