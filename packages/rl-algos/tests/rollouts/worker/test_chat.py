import copy

import numpy as np
import pytest
from chat_tokenizers import tokenizer_of

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.tiny_model import make_tokenizer

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
SAID = {
    "qwen3": ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<|im_end|>"),
    "qwen3_6": ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "<|im_end|>"),
    "llama3_1": ('{"name": "add", "parameters": {"a": 1}}', "<|eom_id|>"),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "</s>"),
    "deepseek_v3": (
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
        "<｜end▁of▁sentence｜>",
    ),
    "glm4_moe": ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "<|observation|>"),
    "gpt_oss": ('<|channel|>commentary to=functions.add<|message|>{"a": 1}', "<|call|>"),
}


def ids(tokenizer, text):
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


@pytest.mark.parametrize("family", SAID)
def test_a_call_is_read_from_tokens_and_its_answer_rendered_behind_them(family):
    tokenizer, (text, end) = tokenizer_of(family), SAID[family]
    chat = Chat(tokenizer)
    sampled = ids(tokenizer, text + end)
    assert int(sampled[-1]) in chat.ends.sampled
    reply = chat.read(sampled, TOOLS)
    [call] = reply.tool_calls
    assert (call.name, call.error, str(call.arguments["a"])) == ("add", "", "1")
    assert not reply.has_invalid_call
    assert chat.read(ids(tokenizer, text.replace("1", "<") + end), TOOLS).has_invalid_call or "{" not in text
    assert len(call.id) == 9
    result = {"role": "tool", "name": "add", "content": "the result", "tool_call_id": call.id}
    behind = tokenizer.decode(chat.continuation(reply.message, [result], sampled), skip_special_tokens=False)
    assert "the result" in behind
    assert end not in behind.split("the result")[0]


def test_without_tools_a_turn_is_its_text():
    tokenizer = tokenizer_of("qwen3")
    text = SAID["qwen3"][0]
    reply = Chat(tokenizer).read(ids(tokenizer, text + "<|im_end|>"))
    assert (reply.text, reply.tool_calls) == (text, ())
    assert reply.message == {"role": "assistant", "content": text}


def test_the_marks_of_thoughts_stay_in_the_text_if_they_are_special_tokens():
    tokenizer = copy.deepcopy(tokenizer_of("mistral"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    reply = Chat(tokenizer).read(ids(tokenizer, "[THINK]Hm: 41[/THINK]42[TOOL_RESULTS]</s>"))
    assert reply.text == "[THINK]Hm: 41[/THINK]42"


def test_a_turn_in_channels_is_its_final_one_with_or_without_tools():
    tokenizer = tokenizer_of("gpt_oss")
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"
    assert [Chat(tokenizer).read(ids(tokenizer, said), tools).text for tools in ((), TOOLS)] == ["3", "3"]


def test_a_named_format_is_read_whatever_the_template_says():
    tokenizer = make_tokenizer()
    said = ids(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call><|end|>')
    assert Chat(tokenizer).read(said, TOOLS).tool_calls == ()
    assert [call.name for call in Chat(tokenizer, "hermes").read(said, TOOLS).tool_calls] == ["add"]


@pytest.mark.parametrize(
    ("said", "num_calls"),
    [
        ("Perhaps {call}? No.</think>\n\n3", 0),
        ("Perhaps {call}? Yes.</think>\n\n{call}", 1),
        ("\n</think>\n\n{call}", 1),
        ("{call}", 1),
    ],
)
def test_no_call_is_made_in_thoughts_that_the_prompt_has_opened(said, num_calls):
    tokenizer, (call, end) = tokenizer_of("qwen3_6"), SAID["qwen3_6"]
    reply = Chat(tokenizer).read(ids(tokenizer, said.replace("{call}", call) + end), TOOLS)
    assert [(each.name, each.error) for each in reply.tool_calls] == [("add", "")] * num_calls


@pytest.mark.parametrize("family", SAID)
def test_hostile_calls_are_answered_and_the_conversation_continues(family):
    """No call, however broken, fails a rollout: its error is rendered as an observation."""
    tokenizer, (text, end) = tokenizer_of(family), SAID[family]
    chat = Chat(tokenizer)
    for broken in (text[: len(text) * 3 // 4], text.replace("1", "[" * 3000), text.replace("add", "a b"), text * 3):
        sampled = ids(tokenizer, broken + end)
        reply = chat.read(sampled, TOOLS)
        told = [
            {"role": "tool", "name": call.name, "content": "E", "tool_call_id": call.id} for call in reply.tool_calls
        ]
        assert told
        assert len(chat.continuation(reply.message, told, sampled))


def test_a_malformed_call_stays_in_the_conversation_as_one():
    tokenizer = tokenizer_of("qwen3")
    reply = Chat(tokenizer).read(ids(tokenizer, "<tool_call>add</tool_call><|im_end|>"), TOOLS)
    assert [call.name for call in reply.tool_calls] == [""]
    assert "not valid JSON" in reply.tool_calls[0].error
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["unknown"]
