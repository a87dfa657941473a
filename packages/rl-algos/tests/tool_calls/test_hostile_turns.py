"""Turns that no honest policy writes: each is read in linear time, without an exception, within bounds."""

import pickle

import pytest
from offered_tools import FAMILIES, read

from rl_algos.tool_calls.parsed import MAX_CALLS

CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
    "qwen_coder": (
        "<tool_call><function=add><parameter=a>1</parameter><parameter=of>%s</parameter></function></tool_call>"
    ),
    "glm": (
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>of</arg_key><arg_value>%s</arg_value>"
        "</tool_call>"
    ),
    "llama": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": %s}]',
    "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    "harmony": "<|channel|>commentary to=functions.add<|message|>%s",
}
"""By format, a call with a place for JSON."""

UNITS = [
    *("<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"\\"'),
    *(
        "<tool_call><function=f>",
        "<tool_call><function=f><parameter=a>",
        "<parameter=a>",
        "<parameter=",
        "</parameter>",
    ),
    *("<parameter=a>1</parameter>", "<function=", "</function>", "</parameter>\n", "<tool_call><function="),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_key>a</arg_key><arg_value>",
        "<arg_value>",
        "</arg_value>",
        "<tool_call>f<arg_key>",
    ),
    *("<tool_call>f", "<tool_call>f</tool_call>", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    *(
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS]{}",
        "[TOOL_CALLS][",
        "[TOOL_CALLS]f[CALL_ID]",
        "[ARGS]",
    ),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *(
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    ),
    *("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>", "to=functions.f", "<|start|>to=f<|message|>"),
    *("<|start|>to=functions.f<|message|>{}<|end|>", "<|start|>a<|message|>b"),
    *("<|python_tag|>", '{"name": "f", "parameters": {}};', '{"name": "', '"parameters"', "<think>", "</think>"),
    *("<think></think>", "<think><tool_call>{}</tool_call></think>", "[", "{", '"', "\\", "{}", "[]", "a", " ", "\n"),
]
"""Marks that are closed, half open, alternating and nested."""


AROUND = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_coder": ("<tool_call><function=f>", "</function></tool_call>"),
    "glm": ("<tool_call>f", "</tool_call>"),
}
"""By format, the beginning and the end of a call in which marks are repeated."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("unit", UNITS)
def test_200_kilobytes_of_a_mark_are_read_in_linear_time(name, unit):
    """Each takes milliseconds. Quadratic time would take minutes."""
    begin, end = AROUND.get(name, ("", ""))
    text = begin + unit * (200_000 // len(unit)) + end
    calls = read(name, text, opened="<think>" if "think>" in unit else "").calls
    assert len(calls) <= MAX_CALLS + 1
    assert all(len(call.error) < 500 and len(call.name) <= 128 for call in calls)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("written", "problem"),
    [
        pytest.param("[" * 3000, "nested more than 32 deep", id="3,000 open lists"),
        pytest.param('{"a":' * 40 + "1" + "}" * 40, "nested more than 32 deep", id="40 objects"),
        pytest.param('{"of": ' + "[" * 600 + "]" * 600 + "}", "nested more than 32 deep", id="too deep to be pickled"),
        pytest.param("[" * 100_000 + "]" * 100_000, "nested more than 32 deep", id="too deep for Python"),
        pytest.param('{"a": ' + "9" * 5000 + "}", "4300 digits", id="an integer of 5,000 digits"),
        pytest.param('{"a": NaN}', "NaN is not a number", id="NaN"),
        pytest.param('{"a": 1e999}', "too large", id="a float that would be infinite"),
        pytest.param('{"a": 1, "a": 2}', "the key 'a' twice", id="a key twice"),
        pytest.param('{"note": "\\ud83d"}', "\\ud83d", id="half of a surrogate pair"),
        pytest.param("[1]", "must be a JSON object", id="a list in place of an object"),
        pytest.param('{"a": 1', "", id="cut off [NousResearch/hermes-agent#1796]"),
    ],
)
def test_arguments_beyond_the_bounds_are_a_malformed_call(name, written, problem):
    [call] = read(name, CALLS[name] % written).calls
    if call.error or name not in ("qwen_coder", "glm"):
        assert problem in call.error
        assert (call.name, call.arguments) in [("add", {}), ("", {})]
    else:  # a text that the tool refuses, as it is no list
        assert written.startswith("{") or written == "[1]"
    assert pickle.loads(pickle.dumps(call)) == call


def test_calls_past_the_limit_are_answered_by_one_error():
    calls = read("hermes", CALLS["hermes"] % '{"a": 1}' * 1000).calls
    assert [call.error for call in calls[:MAX_CALLS]] == [""] * MAX_CALLS
    assert [str(MAX_CALLS) in call.error for call in calls[MAX_CALLS:]] == [True]


@pytest.mark.parametrize("tool", ["x" * 200_000, "", "a b", "<|im_end|>", "a\nb", "f\x00"])
def test_a_name_that_no_tool_can_have_reaches_no_observation(tool):
    [call] = read("deepseek", f"<｜tool▁call▁begin｜>{tool}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>").calls
    assert (call.name, bool(call.error)) == ("", True)
