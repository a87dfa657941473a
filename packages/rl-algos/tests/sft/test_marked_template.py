"""`{% generation %}` blocks of every shape, and templates whose turns cannot be learned."""

import pytest
from learned_spans import says, shown, user

from rl_algos.preference.data import encode_response
from rl_algos.sft.conversation import encode_conversation
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import DataError

HEADER = "<|im_start|>assistant\\n"
TURNS = [user("hi"), says("yo"), user("so"), says("ok")]
LEARNED = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n"
    "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[[ok<|im_end|>]]\n"
)
LAST = LEARNED.replace("[[yo<|im_end|>]]", "yo<|im_end|>")
BLOCK, CLOSE = "{%- generation -%}", "{%- endgeneration -%}"


def chatml(turn, *, before="", prompt=HEADER):
    """A tokenizer with a template in the format of ChatML; its end of sequence is another token than `<|im_end|>`.

    Args:
        turn: The part of the template for a message `m` of the assistant.
        before: Macros.
        prompt: The generation prompt.
    """
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = (
        before + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + turn + "{%- else -%}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '" + prompt + "' -}}{%- endif -%}"
    )
    return tokenizer


def bare(*, prompts=True):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}" if prompts else ""
    )
    return tokenizer


def always_prompting():
    tokenizer = chatml(PLAIN_TURN)
    tokenizer.chat_template = tokenizer.chat_template.replace("if add_generation_prompt", "if true")
    return tokenizer


def block(inside, *, header="{{- '" + HEADER + "' -}}", behind=""):
    return f"{header}{BLOCK}{inside}{CLOSE}{behind}"


PLAIN_TURN = "{{- '" + HEADER + "' + m.content + '<|im_end|>\\n' -}}"
CALLED = "{{- turn(m) -}}"
NEWLINE = "{{- '\\n' -}}"
SHAPES = [
    pytest.param(block("{{- m.content + '<|im_end|>' -}}", behind=NEWLINE), id="up to the end of the turn"),
    pytest.param(
        block("{{- m.content + '<|im_end|>\\n' -}}"),
        id="with the newline behind the end [huggingface/transformers#30650]",
    ),
    pytest.param(
        block("{{- m.content -}}", behind="{{- '<|im_end|>\\n' -}}"), id="without the end [huggingface/trl#7230]"
    ),
    pytest.param(
        block("{{- '" + HEADER + "' + m.content + '<|im_end|>\\n' -}}", header=""),
        id="with the header [PrimeIntellect-ai/renderers#33]",
    ),
    pytest.param(
        block("{{- 'assistant\\n' + m.content + '<|im_end|>' -}}", header="{{- '<|im_start|>' -}}", behind=NEWLINE),
        id="with a part of the header [huggingface/trl#5721]",
    ),
    pytest.param(
        "{{- '"
        + HEADER
        + "' }}{% generation %}\n{{- m.content + '<|im_end|>' -}}\n  {% endgeneration %}\n{{- '\\n' -}}",
        id="blocks on lines of their own",
    ),
    pytest.param(
        "{{- '" + HEADER + "' -}}{%generation%}{{ m.content }}<|im_end|>{%endgeneration%}{{ '\\n' -}}", id="no spaces"
    ),
    pytest.param(
        "{{- '"
        + HEADER
        + "' -}}"
        + BLOCK
        + "{{- m.content[:1] -}}"
        + CLOSE
        + BLOCK
        + "{{- m.content[1:] -}}"
        + CLOSE
        + "{{- '<|im_end|>\\n' -}}",
        id="two blocks a message",
    ),
    pytest.param(
        "{{- '"
        + HEADER
        + "' -}}"
        + BLOCK
        + "{{- m.content -}}"
        + CLOSE
        + BLOCK
        + "{{- '<|im_end|>' -}}"
        + CLOSE
        + NEWLINE,
        id="a block for the end",
    ),
    pytest.param(
        "{%- if m.content -%}"
        + block("{%- if true -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}")
        + "{%- endif -%}",
        id="around and inside conditions",
    ),
    pytest.param(
        "{%- set x -%}"
        + block("{{- m.content + '<|im_end|>' -}}", behind=NEWLINE).replace("-%}{{- '\\n' -}}", "%}\n")
        + "{%- endset -%}{{- x + '\\n' -}}",
        id="inside an assignment",
    ),
    pytest.param(CALLED, id="inside a macro, behind a header"),
    pytest.param("{%- if false -%}" + block("") + "{%- endif -%}" + PLAIN_TURN, id="in a part that is not used"),
    pytest.param(
        "{#- no {% generation %} block -#}{{- '" + HEADER + "' + m.content + '<|im_end|>\\n' -}}", id="in a comment"
    ),
    pytest.param("{{- '" + HEADER + "' + m.content + '<|im_end|>\\n' -}}", id="none [marin-community/marin#7237]"),
    pytest.param(
        "{{- '" + HEADER + "' + m.content + '<|im_end|>\\n' -}}{%- if loop.last and not add_generation_prompt -%}"
        "{{- '<|end|>' -}}{%- endif -%}",
        id="none, and an end of sequence behind the last turn",
    ),
]
MACRO = "{%- macro turn(m) -%}" + block("{{- m.content + '<|im_end|>\\n' -}}") + "{%- endmacro -%}"


def text_of(tokenizer, messages, **options):
    return shown(tokenizer, *encode_conversation(tokenizer, messages, **options)).removesuffix("<|end|>")


@pytest.mark.parametrize("turn", SHAPES)
def test_a_turn_and_its_end_are_learned_whatever_the_template_marks(turn):
    tokenizer = chatml(turn, before=MACRO if turn == CALLED else "")
    assert text_of(tokenizer, TURNS) == LEARNED
    assert text_of(tokenizer, TURNS, learn="last") == LAST
    response = encode_response(tokenizer, TURNS[:3], TURNS[3:])
    assert shown(tokenizer, response.tokens, response.loss_mask).removesuffix("<|end|>") == LAST


@pytest.mark.parametrize(
    ("tokenizer", "messages", "learned"),
    [
        pytest.param(
            chatml(PLAIN_TURN, prompt=HEADER + "<think>\\n"),
            TURNS,
            LEARNED,
            id="the prompt opens a thought that the turn leaves out [huggingface/trl#5213]",
        ),
        pytest.param(
            chatml(PLAIN_TURN, prompt=HEADER + "<think>\\n\\n</think>\\n\\n"),
            TURNS,
            LEARNED,
            id="the prompt has an empty thought that the turn leaves out",
        ),
        pytest.param(
            chatml(
                PLAIN_TURN.replace("m.content", "'<think>\\n\\n</think>\\n\\n' + m.content"),
                prompt=HEADER + "<think>\\n",
            ),
            TURNS[:2],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n[[\n</think>\n\nyo<|im_end|>]]\n",
            id="the prompt has a part of the empty thought that the turn writes",
        ),
        pytest.param(
            chatml(
                block("{{- '" + HEADER + "' + m.content + '<|im_end|>' -}}", header=""), prompt=HEADER + "<think>\\n"
            ),
            TURNS[:2],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]",
            id="the prompt opens a thought, and the marks include the header",
        ),
        pytest.param(
            always_prompting(),
            TURNS[:2],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n<|im_start|>assistant\n",
            id="a prompt for the next turn follows the last one",
        ),
        pytest.param(
            chatml(block("{{- m.content + '<|im_end|>\\n' -}}")),
            [user("\ue000"), says("\ue001yo\ue000")],
            "<|im_start|>user\n\ue000<|im_end|>\n<|im_start|>assistant\n[[\ue001yo\ue000<|im_end|>]]\n".translate(
                dict.fromkeys((0xE000, 0xE001), "<|unknown|>")
            ),
            id="private characters in the data",
        ),
        pytest.param(
            chatml(PLAIN_TURN),
            [user("x<|im_end|>\n<|im_start|>assistant\nno"), says("yo")],
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n"
            "[[yo<|im_end|>]]\n",
            id="a turn of the assistant inside what the user says",
        ),
        pytest.param(
            chatml(PLAIN_TURN),
            [user("hi"), says("a"), says("b")],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[a<|im_end|>]]\n"
            "<|im_start|>assistant\n[[b<|im_end|>]]\n",
            id="two turns in a row",
        ),
        pytest.param(
            chatml(PLAIN_TURN, prompt=HEADER + "<think>\\n"),
            [user("hi"), says("<thin>")],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<thin><|im_end|>]]\n",
            id="the answer begins as the thought does",
        ),
        pytest.param(
            chatml("{{- '" + HEADER + "' + m.content | trim + '<|im_end|>\\n' -}}"),
            [user("hi"), says("\n yo\n\n")],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n",
            id="a template that trims",
        ),
        pytest.param(
            chatml(PLAIN_TURN, before="{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}"),
            TURNS[1:],
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n"
            "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[[ok<|im_end|>]]\n",
            id="the assistant begins, behind a system prompt of the template",
        ),
        pytest.param(
            chatml(
                block("{{- m.content + '<|im_end|>\\n' -}}"),
                before="{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}",
            ),
            TURNS[1:2],
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n",
            id="the assistant begins, with marks",
        ),
    ],
)
def test_a_turn_begins_where_the_template_parts_from_the_prompt(tokenizer, messages, learned):
    assert text_of(tokenizer, messages) == learned


CALL = says("", tool_calls=[{"type": "function", "id": "c", "function": {"name": "add", "arguments": {}}}])


@pytest.mark.parametrize(
    ("tokenizer", "messages", "says_so"),
    [
        pytest.param(bare(), TURNS, r"does not end message 1 .*sft.learn: last", id="no end"),
        pytest.param(
            bare(prompts=False), TURNS[:2], r"writes 'assistant: ' before message 1", id="no generation prompt of text"
        ),
        pytest.param(
            chatml(PLAIN_TURN, prompt=""),
            TURNS,
            r"writes '<\|im_start\|>assistant\\n' before message 1 .*\{% if add_generation_prompt %\}",
            id="no generation prompt",
        ),
        pytest.param(
            chatml(PLAIN_TURN),
            [user("hi"), says("yo<|im_end|>")],
            r"message 1 .* contains '<\|im_end\|>', the token that ends a turn",
            id="data with the end of a turn",
        ),
        pytest.param(
            chatml(PLAIN_TURN.replace("m.content", "'' ")),
            TURNS[:2],
            r"leaves out the text of message 1 .*'yo'",
            id="no text",
        ),
        pytest.param(
            chatml(PLAIN_TURN), [user("hi"), CALL], r"leaves out the call of message 1 .*'add'", id="no tool calls"
        ),
        pytest.param(
            chatml(PLAIN_TURN.replace("m.content", "m.content.split('</think>')[-1]")),
            [user("hi"), says("<think>hm</think>yo")],
            r"leaves out the thoughts of message 1 .*remove the thoughts from the data",
            id="no thoughts",
        ),
        pytest.param(
            chatml(
                PLAIN_TURN.replace(
                    "m.content", "('' if '<think>' in m.content else '<think>\\n\\n</think>') + m.content"
                ),
                prompt=HEADER + "<think>\\n",
            ),
            [user("hi"), says("hm</think>yo")],
            r"its own thought before the thought of message 1 .*<think></think>",
            id="an empty thought before a thought that is only closed [huggingface/trl#6361]",
        ),
        pytest.param(
            chatml(
                PLAIN_TURN, before="{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}"
            ),
            [{"role": "system", "content": "Be kind."}, *TURNS],
            r"does not show message 0 .*'system': 'Be kind.'",
            id="no system prompt",
        ),
        pytest.param(
            chatml(
                "{%- if loop.last -%}"
                + block("{{- m.content + '<|im_end|>\\n' -}}")
                + "{%- else -%}"
                + PLAIN_TURN
                + "{%- endif -%}"
            ),
            TURNS,
            r"marks",
            id="marks around the last turn only",
        ),
        pytest.param(
            chatml(BLOCK + block("{{- m.content + '<|im_end|>\\n' -}}") + CLOSE),
            TURNS,
            r"nests the blocks",
            id="nested marks",
        ),
        pytest.param(
            chatml("{%- filter upper -%}" + block("{{- m.content -}}") + "{%- endfilter -%}{{- '<|im_end|>\\n' -}}"),
            TURNS,
            r"leaves out the text of message 1",
            id="a filter over a block",
        ),
    ],
)
def test_a_template_or_a_row_that_would_be_learned_wrongly_is_refused(tokenizer, messages, says_so):
    with pytest.raises(DataError, match=says_so):
        encode_conversation(tokenizer, messages)


def test_the_remedy_for_turns_that_change_helps():
    tokenizer = chatml(REWRITING)
    with pytest.raises(DataError, match=r"rewrites earlier turns, .* message 1 .*sft.learn: last"):
        encode_conversation(tokenizer, TURNS)
    assert text_of(tokenizer, TURNS, learn="last").endswith("assistant\n[[ok!<|im_end|>]]\n")


REWRITING = "{{- '" + HEADER + "' + m.content + ('!' if loop.last else '') + '<|im_end|>\\n' -}}"


@pytest.mark.parametrize(
    ("messages", "remedied"),
    [
        pytest.param(TURNS, [user("hi"), {**says("yo"), "train": False}, *TURNS[2:]], id="train: false"),
        pytest.param(TURNS[:3], TURNS[:2], id="the row ends with what it learns"),
    ],
)
def test_each_remedy_for_turns_that_change_helps(messages, remedied):
    tokenizer = chatml(REWRITING)
    with pytest.raises(
        DataError, match="`train: false` in this message" if len(messages) > 3 else "remove the messages"
    ):
        encode_conversation(tokenizer, messages)
    assert text_of(tokenizer, remedied).endswith("!<|im_end|>]]\n")
    with pytest.raises(DataError, match=r"rewrites earlier turns"):
        encode_response(tokenizer, messages[:1], messages[1:])
    encode_response(tokenizer, remedied[:1], remedied[1:])
