import pytest
from chat_tokenizers import tokenizer_of

from rl_algos.tiny_model import make_tokenizer
from rl_algos.tool_calls.formats import FORMATS, PLAIN, format_of
from rl_algos.tool_calls.parsed import schemas_of
from rl_core.rollouts.environment import ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "of": {"type": "array"}},
            },
        },
    }
]


def read(name, text):
    found = FORMATS[name].parse(text, schemas_of(TOOLS))
    return found.content, list(found.calls)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_6", "qwen_coder"),
        ("llama3_1", "llama"),
        ("mistral", "mistral"),
        ("deepseek_v3", "deepseek"),
        ("glm4_moe", "glm"),
        ("gpt_oss", "harmony"),
    ],
)
def test_the_chat_template_tells_the_format(family, name):
    assert format_of(tokenizer_of(family).chat_template) is FORMATS[name]


def test_a_template_without_tools_has_no_calls_unless_a_format_is_named():
    assert format_of(make_tokenizer().chat_template) is PLAIN
    assert format_of(None) is PLAIN
    assert format_of(make_tokenizer().chat_template, "hermes") is FORMATS["hermes"]


CALL = ToolCall("add", {"a": 1, "note": "2"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Wait.<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "2"}}\n</tool_call>'),
        (
            "qwen_coder",
            (
                "Wait.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n"
                "</function>\n</tool_call>"
            ),
        ),
        (
            "glm",
            (
                "Wait.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
                "<arg_value>2</arg_value>\n</tool_call>"
            ),
        ),
        ("mistral", 'Wait.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "2"}, "id": "123456789"}]'),
        ("mistral", 'Wait.[TOOL_CALLS]add[ARGS]{"a": 1, "note": "2"}'),
        (
            "deepseek",
            (
                "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
                '{"a": 1, "note": "2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
        ),
        (
            "deepseek",
            (
                "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
                '{"a": 1, "note": "2"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
        ),
    ],
)
def test_a_call_is_read_apart_from_the_text_before_it(name, text):
    assert read(name, text) == ("Wait.", [CALL])


def test_a_call_of_llama_is_the_whole_turn():
    call = '{"name": "add", "parameters": {"a": 1, "note": "2"}}'
    assert read("llama", call) == read("llama", f"<|python_tag|>{call}") == ("", [CALL])
    assert read("llama", '{"sum": 3}') == ('{"sum": 3}', [])


def test_a_turn_of_harmony_is_read_by_its_channels():
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    arguments = '<|message|>{"a": 1, "note": "2"}'
    before = f"{thought} to=functions.add<|channel|>commentary json{arguments}"
    behind = f"{thought}<|channel|>commentary to=functions.add <|constrain|>json{arguments}"
    assert read("harmony", before) == read("harmony", behind) == ("", [CALL])
    assert read("harmony", f"{thought}<|channel|>final<|message|>It is 3.") == ("It is 3.", [])


@pytest.mark.parametrize("name", FORMATS)
def test_a_plain_answer_has_no_calls(name):
    said = "<|channel|>final<|message|>It is 3." if name == "harmony" else "It is 3."
    assert read(name, said) == ("It is 3.", [])


def test_several_calls_come_in_order():
    text = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in range(3))
    assert [call.arguments for call in read("hermes", text)[1]] == [{"a": 0}, {"a": 1}, {"a": 2}]
    text = "".join(f'[TOOL_CALLS]add[ARGS]{{"a": {n}}}' for n in range(3))
    assert [call.arguments for call in read("mistral", text)[1]] == [{"a": 0}, {"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "glm"])
def test_a_call_within_thoughts_is_not_made(name):
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read(name, f"<think>{call}</think>\n3") == (f"<think>{call}</think>\n3", [])
    assert read(name, f"<think>{call}")[1] == []


def test_values_without_quotes_have_the_types_of_the_schema():
    text = "<tool_call><function=add><parameter=of>\n[1, 2]\n</parameter><parameter=note>\nx\ny\n</parameter>"
    assert read("qwen_coder", f"{text}</function></tool_call>")[1][0].arguments == {"of": [1, 2], "note": "x\ny"}
    text = "<tool_call><function=add><parameter=a>\none\n</parameter></function></tool_call>"
    assert read("qwen_coder", text)[1][0].arguments == {"a": "one"}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "not closed"),
        ("hermes", "<tool_call>add(1)</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "text `name`"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "must be a JSON object"),
        ("hermes", "<tool_call>[]</tool_call>", "text `name`"),
        ("qwen_coder", "<tool_call>add</tool_call>", "must be <function=NAME>"),
        ("qwen_coder", "<tool_call><function=add></function>", "not closed"),
        ("qwen_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>", "</parameter>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "<arg_value>"),
        ("glm", "<tool_call></tool_call>", "name of a tool"),
        ("llama", '{"name": "add", "parameters": {', "not valid JSON"),
        ("llama", "<|python_tag|>add(1)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add 1", "not valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "empty"),
        ("mistral", "[TOOL_CALLS]add[ARGS]1", "must be a JSON object"),
        ("deepseek", "<｜tool▁call▁begin｜>add", "not closed"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", "tool▁sep"),
        ("harmony", "<|channel|>commentary to=functions.add", "<|message|>"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>1", "must be a JSON object"),
    ],
)
def test_a_malformed_call_says_why(name, text, problem):
    [call] = read(name, text)[1]
    assert problem in call.error
    assert not call.arguments
