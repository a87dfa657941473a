"""Requests for a form of the answer: refused, ignored, or constrained by a grammar of the policy's own tokens."""

import asyncio
import json

import numpy as np
import openai
import pytest
from chat_tokenizers import tokenizer_of
from scripted_client import END, ScriptedClient, calls_of, says
from served_rollout import served

from rl_algos.rollouts.worker.chat import Chat
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.program import AnswerForm, requested_schema

SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = calls_of('{"a": 1}')
USER = [{"role": "user", "content": "1 + 2?"}]


def asked(write, *, structured_output, **fields):
    """The answer to a request or its error, the grammar that its completion had, and the fields without effect."""

    async def main():
        policy = ScriptedClient(write)
        async with served(policy, structured_output=structured_output) as rollout:
            try:
                answer = await rollout.openai.chat.completions.create(model="m", messages=USER, **fields)
            except openai.APIStatusError as error:
                return error, None, rollout.session.ignored
            return answer.choices[0].message, policy.requests[0][1].grammar, rollout.session.ignored

    return asyncio.run(main())


def accepts(chat, grammar, text):
    """Whether a grammar allows a text as a whole turn."""
    end = chat.ends.sampled[0]
    tokens = np.array([*chat.encoded(text), end], np.int32)
    try:
        chat.allowed(SamplingParams(1, grammar=grammar, stop_token_ids=(end,)), tokens)
    except ValueError:
        return False
    return True


def test_a_format_is_refused_with_the_remedy_unless_the_run_ignores_or_constrains_it():
    error, _, _ = asked(says("3"), structured_output="refuse", response_format=FORMAT)
    assert error.status_code == 400
    assert error.param == "response_format"
    assert "set structured_output of the algorithm to constrain, or to ignore" in str(error)
    message, grammar, ignored = asked(says("three"), structured_output="ignore", response_format=FORMAT)
    assert (message.content, grammar, ignored) == ("three", "", {"response_format"})
    message, grammar, ignored = asked(says('{"sum": 3}'), structured_output="constrain", response_format=FORMAT)
    assert message.content == '{"sum": 3}'
    assert not ignored
    chat = Chat(tokenizer_of("qwen3"))
    assert accepts(chat, grammar, '{"sum": 3}')
    assert not accepts(chat, grammar, "three")
    assert not accepts(chat, grammar, '{"sum": "3"}')


@pytest.mark.parametrize("structured_output", ["refuse", "ignore"])
def test_forced_calls_are_free_unless_the_run_constrains(structured_output):
    fields = {"tools": [ADD], "tool_choice": "required"}
    message, grammar, ignored = asked(says("3"), structured_output=structured_output, **fields)
    assert (message.content, grammar, ignored) == ("3", "", {"tool_choice"})


def test_a_forced_call_is_a_call_of_one_of_the_tools():
    fields = {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    message, grammar, ignored = asked(says(CALL), structured_output="constrain", **fields)
    assert [call.function.name for call in message.tool_calls] == ["add"]
    assert not ignored
    chat = Chat(tokenizer_of("qwen3"))
    assert accepts(chat, grammar, CALL)
    assert accepts(chat, grammar, "<think>\nTwo.\n</think>\n\n" + CALL), "the policy may think"
    assert not accepts(chat, grammar, "No.")
    assert not accepts(chat, grammar, calls_of('{"a": "x"}'))
    fields["tool_choice"] = {"type": "function", "function": {"name": "sub"}}
    error, _, _ = asked(says("3"), structured_output="constrain", **fields)
    assert error.status_code == 400
    assert "no such tool" in str(error)


def test_strict_tools_constrain_the_arguments_and_leave_the_text_free():
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    _, grammar, _ = asked(says("3"), structured_output="constrain", tools=[strict])
    chat = Chat(tokenizer_of("qwen3"))
    assert accepts(chat, grammar, "It is 3.")
    assert accepts(chat, grammar, "So: " + CALL)
    assert not accepts(chat, grammar, calls_of('{"a": "x"}'))
    assert asked(says("3"), structured_output="constrain", tools=[ADD])[1] == "", "other tools are free"


def test_strict_tools_are_without_effect_if_a_text_may_begin_like_a_call():
    chat = Chat(tokenizer_of("llama3_1"))
    assert chat.grammar(AnswerForm(tools=json.dumps([ADD])), np.zeros(0, np.int32)) == ""


def test_forms_that_would_break_the_compiler_are_refused():
    deep = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "deep", "schema": deep}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}], "tool_choice": "required"},
    ):
        error, _, _ = asked(says("3"), structured_output="constrain", **fields)
        assert error.status_code == 400


def test_a_format_next_to_tools_leaves_the_choice_to_the_policy():
    _, grammar, _ = asked(says('{"sum": 3}'), structured_output="constrain", response_format=FORMAT, tools=[ADD])
    chat = Chat(tokenizer_of("qwen3"))
    assert accepts(chat, grammar, '{"sum": 3}')
    assert accepts(chat, grammar, CALL)
    assert not accepts(chat, grammar, "3")


def test_the_other_services_ask_for_the_same_grammar():
    async def main():
        policy = ScriptedClient(lambda before, draw: '{"sum": 3}' + END)
        async with served(policy, structured_output="constrain") as rollout:
            flat = {"type": "json_schema", "name": "sum", "schema": SUM}
            await rollout.openai.chat.completions.create(model="m", messages=USER, response_format=FORMAT)
            await rollout.openai.responses.create(model="m", input=USER, text={"format": flat})
            output = {"format": {"type": "json_schema", "schema": SUM}}
            await rollout.post("messages", {"messages": USER, "max_tokens": 99, "output_config": output})
            await rollout.post("messages", {"messages": USER, "max_tokens": 99, "output_format": output["format"]})
        return [sampling.grammar for _, sampling, _ in policy.requests]

    grammars = asyncio.run(main())
    assert len(grammars) == 4
    assert len(set(grammars)) == 1
    assert grammars[0]


CALLS = {
    "qwen3": CALL,
    "qwen3_6": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3_1": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "glm4_moe": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("family", CALLS)
def test_calls_of_a_grammar_are_calls_in_the_format_of_the_policy(family):
    chat = Chat(tokenizer_of(family))
    grammar = chat.grammar(AnswerForm(tools=json.dumps([ADD]), must_call=True), np.zeros(0, np.int32))
    assert accepts(chat, grammar, CALLS[family])
    reply = chat.read(np.array([*chat.encoded(CALLS[family]), chat.ends.sampled[0]]), [ADD])
    assert [(call.name, call.arguments, call.error) for call in reply.tool_calls] == [("add", {"a": 1}, "")]
    assert not accepts(chat, grammar, "No.")


def test_thoughts_that_the_prompt_opened_end_before_the_answer():
    chat = Chat(tokenizer_of("qwen3"))
    form = AnswerForm(json.dumps(SUM))
    opened = chat.grammar(form, chat.encoded("<|im_start|>assistant\n<think>\n"))
    assert accepts(chat, opened, 'One and two.\n</think>\n\n{"sum": 3}')
    assert not accepts(chat, opened, '{"sum": 3}')
    closed = chat.grammar(form, chat.encoded("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    assert accepts(chat, closed, '{"sum": 3}')
    assert not accepts(chat, closed, '<think>x</think>{"sum": 3}')


def test_formats_without_a_grammar_are_refused_by_name():
    with pytest.raises(ValueError, match="no grammar is offered"):
        Chat(tokenizer_of("gpt_oss")).grammar(AnswerForm(json.dumps(SUM)), np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="cannot be made into a grammar"):
        Chat(tokenizer_of("qwen3")).grammar(AnswerForm('{"type": "sum"}'), np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="is not offered; pass json_schema"):
        requested_schema({"type": "regex"})
