"""A template that leaves a piece of a message out is found. A case is a line: template, conversation, reason."""

import pytest
from chat_tokenizers import Family, tokenizer_of, with_template

from rl_algos.data.prompts import NO_TOOLS, EncodePrompt
from rl_algos.data.rows.example import Example
from rl_algos.sft.conversation import encode_conversation
from rl_algos.template_coverage import _rendered_structure
from rl_core.errors import DataError


def template(said="{{ m.content }}", prompt="<|im_start|>assistant\n"):
    """A template that writes one expression for every message."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}" + said + "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + repr(prompt) + " }}{% endif %}"
    )


def tokenizer(text):
    return with_template(Family(("<|im_end|>", "<|im_start|>"), ("<think>", "</think>")), text)


def user(text, **more):
    return {"role": "user", "content": text, **more}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name="add", *, id="call00001", **arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "R42"}
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
WITH_CALLS = template("{{ m.content }}" + CALLS)
ASKED = [user("hi"), says("yo")]
OF_CALL = [user("hi"), says("", tool_calls=[call(a=1, b={"c": ["x"]}), call("sub", id="call00002", a=0)])]

LEFT_OUT = {
    "a result": (
        template("{% if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% endif %}"),
        [*OF_CALL, RESULT, says("ok")],
        "message 2 .* 'tool': 'R42'",
    ),
    "the end of a result": (
        template("{{ m.content[:60] }}" + CALLS),
        [*OF_CALL, {**RESULT, "content": "x" * 70}, says("ok")],
        "the text of message 2",
    ),
    "arguments": (
        template("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"),
        OF_CALL,
        r"the arguments of call 0 \(from 0\) of message 1",
    ),
    "the second call": (
        template("{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"),
        OF_CALL,
        "call of message 1 .*'sub'",
    ),
    "a nested argument": (
        template(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v if v is not mapping else '' }}{% endfor %}"
            "{% endfor %}"
        ),
        OF_CALL,
        "the arguments of call 0 .*'c'",
    ),
    "an argument that is 0": (
        template(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{% for k, v in c.function.arguments.items() %}{% if v %}{{ k }}{{ v | tojson }}{% endif %}{% endfor %}"
            "{% endfor %}"
        ),
        OF_CALL,
        "the arguments of call 1 .*'a'",
    ),
    "a name of a speaker": (template(), [user("hi", name="Ada"), says("yo")], "the `name` of message 0 .*'Ada'"),
    "what else is said": (template(), [user("hi"), says("yo", refusal="no")], "`refusal` of message 1"),
    "images of a message": (template(), [user("hi", images=["a.png"]), says("yo")], "`images` of message 0"),
    "arguments that are not marked": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
        + CALLS
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        OF_CALL,
        "an argument of a call, outside of message 1",
    ),
    "thoughts as a list": (
        template(),
        [user("hi"), says("yo", reasoning_details=[{"text": "hm"}])],
        "`reasoning_details` of message 1",
    ),
    "text of the assistant that is not learned": (
        template("{{ '' if loop.index0 == 1 else m.content }}" + CALLS),
        [user("hi"), says("look", train=False, tool_calls=[call(a=1)]), RESULT, says("ok")],
        "the text of message 1",
    ),
    "text before thoughts": (
        template("{{ m.content.split('</think>')[-1] if loop.last else m.content }}"),
        [user("hi"), says("first <think></think>yo")],
        "a part of the text of message 1 .*'first <think>'",
    ),
    "which result is which": (
        WITH_CALLS,
        [*OF_CALL, {"role": "tool", "name": "sub", "content": "R1"}, RESULT, says("ok")],
        r"message 3 .* is the result of call 0",
    ),
    "an id": (
        template("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function | tojson }}{% endfor %}"),
        [user("hi"), says("", tool_calls=[{key: value for key, value in call(a=1).items() if key != "id"}])],
        "the `id` of tool calls, but a tool call of message 1",
    ),
    "the id of a result": (
        template("{{ m.content }}" + CALLS + "{% if m.role == 'tool' %}{{ m.tool_call_id | default('') }}{% endif %}"),
        [*OF_CALL, {"role": "tool", "content": "3"}, says("ok")],
        "`tool_call_id` of tool results, but message 2",
    ),
    "a thought in front of a thought": (
        template("{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"),
        [user("hi"), says("<think>hm</think>yo")],
        "writes its own thought",
    ),
    "a thought that the prompt has written": (
        template(
            "{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}",
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        [user("hi"), says("<think>hm</think>yo")],
        "writes its own thought",
    ),
    "a thought with other marks": (
        template("{{ '[THINK]' if m.role == 'assistant' }}{{ m.content }}", "<|im_start|>assistant\n[THINK]"),
        [user("hi"), says("[THINK]hm[/THINK]yo")],
        "writes its own thought",
    ),
    "a thought that the prompt has opened": (
        template("{{ '<think>' if m.role == 'assistant' }}{{ m.content }}", "<|im_start|>assistant\n<think>"),
        [user("hi"), says("<think>hm</think>yo")],
        "writes its own thought",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_piece_that_a_template_leaves_out_is_named(name):
    text, messages, says_so = LEFT_OUT[name]
    with pytest.raises(DataError, match=says_so):
        encode_conversation(tokenizer(text), messages)


SHOWN = {
    "calls": (WITH_CALLS, OF_CALL),
    "results": (WITH_CALLS, [*OF_CALL, RESULT, says("ok")]),
    "results in another order with their names": (
        template("{{ m.content }}" + CALLS + "{% if m.role == 'tool' %}{{ m.name }}{% endif %}"),
        [*OF_CALL, {"role": "tool", "name": "sub", "content": "R1"}, {**RESULT, "tool_call_id": "x"}, says("ok")],
    ),
    "results without names": (WITH_CALLS, [*OF_CALL, {"role": "tool", "content": "R1"}, RESULT, says("ok")]),
    "results in quotes": (
        template("{{ m.content | tojson if m.role == 'tool' else m.content }}" + CALLS),
        [*OF_CALL, {**RESULT, "content": 'a "b"\nß'}, says("ok")],
    ),
    "calls by their ids": (
        template(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
        ),
        [user("hi"), says("", tool_calls=[call(id="functions.add:0", a=1)])],
    ),
    "arguments of a known tool": (
        template(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.code }}"
            "{% endfor %}"
        ),
        [user("hi"), says("", tool_calls=[call(code="print(1)")])],
    ),
    "keys that say nothing": (template(), [user("hi", timestamp="12:00"), says("yo", model="gpt-4")]),
    "a template that asks for a form of ids": (
        template(
            "{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{% if c.id | length != 4 %}{{ raise_exception('four') }}{% endif %}{{ c | tojson }}{% endfor %}"
        ),
        [user("hi"), says("", tool_calls=[call(id="four", a=1)])],
    ),
    "thoughts of earlier turns that are not learned": (
        template("{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"),
        [user("hi"), says("<think>hm</think>yo", train=False), user("so"), says("ok")],
    ),
    "a key that a template reads beside tags": (
        template(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.code }}"
            "{% endfor %}"
        ),
        [user("<b>hi</b> <i>"), says("<p>", tool_calls=[call(code="1")])],
    ),
    "details of thoughts": (
        template("{{ m.content }}{% for d in m.reasoning_details or [] %}{{ d.text }}{% endfor %}"),
        [user("hi"), says("yo", reasoning_details=[{"text": "hm"}])],
    ),
    "arguments in quotes in quotes": (
        template("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson | tojson }}{% endfor %}"),
        [user("hi"), says("", tool_calls=[call(code='print("a\nb")', n=1.5, ok=True)])],
    ),
    "tags in a text": (template(), [user("<b>hi</b>"), says("Write <b> or </think-not>.")]),
    "a thought after the prompt's": (
        template(prompt="<|im_start|>assistant\n<think>\n"),
        [user("hi"), says("<think>hm</think>yo")],
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_template_that_shows_every_piece_is_accepted(name):
    text, messages = SHOWN[name]
    encode_conversation(tokenizer(text), messages)


def test_what_the_prompt_has_opened_is_not_learned_again():
    reader = tokenizer(template(prompt="<|im_start|>assistant\n<think>\n"))
    tokens, mask = encode_conversation(reader, [user("hi"), says("<think>hm</think>yo")])
    assert reader.decode(tokens[mask == 1]) == "hm</think>yo<|im_end|>"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_read_under_any_of_their_keys(key):
    tokens, mask = encode_conversation(tokenizer_of("gpt_oss"), [user("hi"), says("yo", **{key: "hm"})])
    assert "analysis<|message|>hm<|end|>" in tokenizer_of("gpt_oss").decode(tokens[mask == 1])


@pytest.mark.parametrize("messages", [[user("hi", name="Ada")], [*OF_CALL, RESULT]])
def test_prompts_of_rollouts_show_every_piece_too(messages):
    reader = tokenizer(template("{% if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% endif %}"))
    with pytest.raises(DataError, match="does not show"):
        EncodePrompt(reader, NO_TOOLS, None)(Example(tuple(messages)))


def test_conversations_of_one_structure_are_tried_once():
    reader = tokenizer(WITH_CALLS)
    before = _rendered_structure.cache_info().misses
    for number in range(5):
        encode_conversation(reader, [user(f"hi {number}"), says("", tool_calls=[call(a=f"{number}")])])
    assert _rendered_structure.cache_info().misses == before + 1
