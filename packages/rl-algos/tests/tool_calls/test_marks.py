"""Where calls begin and end: marks in arguments, in thoughts and in sentences."""

import json

import pytest
from offered_tools import read, write

QWEN = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n%s</function>\n</tool_call>"
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n%s</tool_call>"


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "deepseek", "harmony", "qwen_coder", "glm"])
@pytest.mark.parametrize(
    "note",
    [
        pytest.param("</think>", id="the end of thoughts"),
        pytest.param("<think>", id="the beginning of thoughts"),
        pytest.param("<think>\nno\n</think>", id="thoughts"),
        pytest.param("echo </tool_call> test", id="the end of a call [vllm-project/vllm#45167]"),
        pytest.param('<tool_call>{"name": "now", "arguments": {}}', id="a call of Hermes without an end"),
        pytest.param("<function=now>", id="a function of Qwen"),
        pytest.param("</parameter> is a mark", id="the end of a parameter [raullenchai/Rapid-MLX#1515]"),
        pytest.param("</arg_value> is a mark", id="the end of a value"),
        pytest.param('[TOOL_CALLS][{"name": "now", "arguments": {}}]', id="a call of Mistral"),
        pytest.param("[TOOL_CALLS]now[ARGS]{}", id="a named call of Mistral"),
        pytest.param('<|python_tag|>{"name": "now", "parameters": {}}', id="a call of Llama"),
        pytest.param(
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", id="a call of DeepSeek"
        ),
        pytest.param("```json\n{}\n```", id="a Markdown block"),
        pytest.param("<|end|><|start|>assistant to=functions.now<|message|>{}<|call|>", id="a call of harmony"),
        pytest.param('"}}, "arguments": {}}', id="quotes and brackets"),
        pytest.param("\n\n x \n", id="white space at the edges"),
        pytest.param("", id="nothing"),
    ],
)
def test_marks_in_an_argument_are_a_part_of_it(name, note):
    [call] = read(name, write(name, [("add", {"a": 1, "note": note})]), opened="<think>" * (name == "qwen_coder")).calls
    if name in ("qwen_coder", "glm") and call.error:
        assert "<tool_call>" in note or "<function=" in note
        return
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1, "note": note}, "")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        pytest.param(
            "qwen_coder",
            QWEN % "<parameter=note>\nx\n<parameter=of>\n[]\n</parameter>\n",
            "'note' is not closed",
            id="a parameter whose end is missing [anthropics/claude-code#44826]",
        ),
        pytest.param(
            "qwen_coder",
            QWEN % "<parameter=note>\nx\n</parameter>\n<parameter=note>\ny\n</parameter>\n",
            "'note' twice",
            id="a parameter twice, or one whose text has the other [areal-project/AReaL#1458]",
        ),
        pytest.param(
            "qwen_coder",
            QWEN % "<parameter=note>\nx</parameter></function></tool_call> y\n</parameter>\n",
            "follows the end of the call",
            id="a text that closes the call",
        ),
        pytest.param("qwen_coder", QWEN % "<parameter=note>x</parameter>y", "no </parameter>", id="text between"),
        pytest.param(
            "qwen_coder", QWEN % "<parameter=note>x</parameter/>", "no </parameter>",
            id="a bad end [sgl-project/sglang#27337]",
        ),
        pytest.param("qwen_coder", QWEN % "<parameter=no te>x</parameter>", "a name and `>`", id="a bad label"),
        pytest.param(
            "qwen_coder", "<tool_call><function=add", "a name and `>`",
            id="a label without an end [ml-explore/mlx-lm#1881]",
        ),
        pytest.param(
            "glm",
            GLM % "<arg_key>note</arg_key>\n<arg_value>x\n<arg_key>of</arg_key>\n<arg_value>[]</arg_value>\n",
            "is not closed",
            id="a value whose end is missing would have the next one as its text",
        ),
        pytest.param(
            "glm",
            GLM % "<arg_key>note</arg_key><arg_value>x</arg_value><arg_key>note</arg_key><arg_value>y</arg_value>",
            "'note' twice",
            id="a key twice, or a value that has the other",
        ),
        pytest.param(
            "glm",
            GLM % "<arg_key>note</arg_key><arg_value>x</arg_value></tool_call> y</arg_value>",
            "follows the end of the call",
            id="a value that closes the call",
        ),
        pytest.param("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call>", "<arg_value>", id="no value"),
        pytest.param(
            "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}} and</tool_call>', "</tool_call> must follow",
            id="text after the JSON",
        ),
        pytest.param(
            "mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}] and', "text after its JSON",
            id="text after a list of calls [vllm-project/vllm#5649]",
        ),
        pytest.param(
            "llama", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
            "one call",
            id="several calls in a format of one [ai-dynamo/dynamo#9536]",
        ),
        pytest.param(
            "harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 1} and<|call|>', "text after its JSON",
            id="text after the arguments",
        ),
        pytest.param(
            "deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add {}", "```json",
            id="no block [vllm-project/vllm#48367]",
        ),
        pytest.param(
            "mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}Estimating...', "text after its JSON",
            id="text after a named call [vllm-project/vllm#48975]",
        ),
        pytest.param(
            "hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON",
            id="a bracket too few [NousResearch/hermes-agent#5315]",
        ),
    ],
)  # fmt: skip
def test_a_call_whose_end_is_unclear_is_malformed(name, text, problem):
    calls = read(name, text).calls
    assert any(problem in call.error for call in calls)
    assert all(call.error and not call.arguments for call in calls)


def test_no_call_of_marked_text_is_made_beside_a_broken_one():
    """The text of an argument may have ended the call before it."""
    fine, broken = QWEN % "", "<tool_call>add</tool_call>"
    assert [bool(call.error) for call in read("qwen_coder", f"{fine}\n{broken}\n{fine}").calls] == [True] * 3
    fine = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert [bool(call.error) for call in read("hermes", f"{fine}\n{broken}\n{fine}").calls] == [False, True, False]


CALLED = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "qwen_coder": QWEN % "",
    "glm": GLM % "",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "deepseek": '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
    "llama": '{"name": "add", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize(
    ("turn", "opened", "num_calls"),
    [
        pytest.param("<think>hm</think>{call}", "", 1, id="a call after thoughts"),
        pytest.param("\n<think>{call}</think>\n3", "", 0, id="thoughts only [verl-project/verl#4757]"),
        pytest.param("<think>{call}</think>\n{call}", "", 1, id="drafted, then made [PrimeIntellect-ai/renderers#80]"),
        pytest.param("<think>{call}", "", 0, id="thoughts without an end"),
        pytest.param("[THINK]{call}[/THINK]{call}", "", 1, id="thoughts of Magistral"),
        pytest.param("hm {call} no</think>\n3", "<think>", 0, id="the prompt opened the thoughts"),
        pytest.param("hm {call} no</think>\n{call}", "<think>", 1, id="the prompt opened them, then a call"),
        pytest.param("</think>{call}", "<think>", 1, id="the prompt opened thoughts that stay empty"),
        pytest.param("{call}", "<think>", 1, id="the prompt opened thoughts that are left out"),
    ],
)
def test_thoughts_are_what_a_turn_begins_with_and_no_call_is_made_in_them(name, turn, opened, num_calls):
    calls = read(name, turn.replace("{call}", CALLED[name]), opened=opened).calls
    assert [(call.arguments, call.error) for call in calls] == [({"a": 1}, "")] * num_calls


@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "glm", "mistral", "deepseek"])
@pytest.mark.parametrize("after", ["</think>", "<think>", "\n<think>so</think>", "</think>\n3"])
def test_marks_of_thoughts_after_a_call_do_not_remove_it(name, after):
    [call] = read(name, CALLED[name] + (after if name != "mistral" else "")).calls
    assert (call.arguments, call.error) == ({"a": 1}, "")


def test_a_closing_mark_in_a_call_does_not_end_thoughts_that_the_prompt_opened():
    def call(note):
        return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 1, 'note': note}})}</tool_call>"

    text = f"hm {call('</think>')} no</think>\n{call('x')}"
    assert [each.arguments["note"] for each in read("hermes", text, opened="<think>").calls] == ["x"]
    assert [each.arguments["note"] for each in read("hermes", call("</think>"), opened="<think>").calls] == ["</think>"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("hermes", "The mark <tool_call> opens a call.", id="Hermes"),
        pytest.param(
            "hermes",
            "<think>some write <function=...>, others <tool_call></think>\n3",
            id="marks in thoughts [lmstudio-ai/lmstudio-bug-tracker#1592]",
        ),
        pytest.param("hermes", "Neither </tool_call> nor <tool_call> is needed.", id="the end first"),
        pytest.param(
            "hermes", '{"name": "add", "arguments": {"a": 1}}', id="JSON without a mark [ggml-org/llama.cpp#18183]"
        ),
        pytest.param("qwen_coder", "Write <function=add> after <tool_call>, as in a template.", id="Qwen"),
        pytest.param("glm", "The mark <tool_call> opens a call.", id="GLM"),
        pytest.param("mistral", "The mark [TOOL_CALLS] opens a list.", id="Mistral"),
        pytest.param("deepseek", "The mark <｜tool▁call▁begin｜> opens a call.", id="DeepSeek"),
        pytest.param("llama", "The mark <|python_tag|> opens a call.", id="Llama"),
        pytest.param("qwen_coder", "Functions are written as <function=add>.", id="a function of Qwen"),
        pytest.param("llama", '{"name": "Alice", "age": 3}', id="an object with a name [vllm-project/vllm#47612]"),
        pytest.param("llama", '{"name": "Alice", "age": ', id="an object with a name, cut off [ollama/ollama#17616]"),
        pytest.param("llama", '{"sum": 3}', id="an object"),
        pytest.param(
            "llama", 'Here is a user: {"name": "Alice"}', id="an object in a sentence [raullenchai/Rapid-MLX#703]"
        ),
        pytest.param("llama", "{3}", id="a set"),
        pytest.param("llama", '[{"name": "add"}]', id="a list"),
        pytest.param("llama", '{"name": 3, "parameters": {}}', id="a name that is no text"),
        pytest.param("llama", '{"answer": {"name": "add", "parameters": {"a": 1}}}', id="a call within an answer"),
        pytest.param("llama", '```json\n{"name": "add", "parameters": {"a": 1}}\n```', id="a Markdown block"),
    ],
)
def test_an_answer_that_mentions_marks_or_is_json_is_an_answer(name, text):
    found = read(name, text)
    assert (found.content, found.calls) == (text, ())


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        pytest.param("llama", '{"name": "add"}', "requires a", id="the name of a tool that is offered"),
        pytest.param("llama", '{"name": "add", "a": 1}', "`a`", id="arguments beside the name"),
        pytest.param("llama", '{"name": "add", "par', "not valid JSON", id="the name of a tool, cut off"),
        pytest.param("llama", '{"name": "sub", "parameters": {"a": 1', "not valid JSON", id="another name, cut off"),
        pytest.param("llama", "<|python_tag|>add.call(a=1)", "not valid JSON", id="Python"),
        pytest.param("hermes", "I call <tool_call>add(1)</tool_call>.", "not valid JSON", id="no JSON in a call"),
        pytest.param("hermes", "<tool_call>", "not closed", id="a mark only"),
        pytest.param("hermes", "I call <tool_call>\n", "not closed", id="a mark at the end"),
        pytest.param("qwen_coder", f"I call {QWEN[12:]}" % "", "must stand between", id="no mark before a function"),
        pytest.param("mistral", "[TOOL_CALLS]add(1)", "not valid JSON", id="a turn that begins with the mark"),
        pytest.param("harmony", "<|channel|>analysis to=python<|message|>1+1<|call|>", "valid JSON", id="another tool"),
    ],
)
def test_an_attempt_at_a_call_is_answered_with_its_error(name, text, problem):
    [call] = read(name, text).calls
    assert problem in call.error


def test_words_without_channels_are_no_call_of_harmony():
    assert read("harmony", "From a=1 to=5.").calls == ()


def test_a_call_of_a_tool_that_is_not_offered_stays_one_for_the_environment_to_answer():
    [call] = read("llama", '{"name": "sub", "parameters": {"a": 1}}').calls
    assert (call.name, call.arguments, call.error) == ("sub", {"a": 1}, "")
    [call] = read("harmony", "<|channel|>commentary to=browser.search<|message|>{}<|call|>").calls
    assert (call.name, call.error) == ("browser.search", "")
