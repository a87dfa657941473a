from itertools import groupby

import numpy as np
import pytest

from rl_algos.sft.conversation import encode_conversation
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import DataError

USER, ASSISTANT = "user", "assistant"
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def talk(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def with_template(template=None):
    tokenizer = make_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def learned(tokenizer, messages):
    """What lies under the loss, one string per run of tokens."""
    tokens, mask = encode_conversation(tokenizer, messages)
    assert (tokens.dtype, mask.dtype, len(tokens)) == (np.int32, np.uint8, len(mask))
    runs = groupby(zip(tokens.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for under, run in runs if under]


TWO_TURNS = talk(("system", "s"), (USER, "1+1="), (ASSISTANT, "2"), (USER, "2+2="), (ASSISTANT, "4"))


@pytest.mark.parametrize("template", [None, PLAIN])
def test_the_loss_is_on_what_the_assistant_says_and_the_end_of_its_turn(template):
    assert learned(with_template(template), TWO_TURNS) == ["2<|end|>", "4<|end|>"]


def test_tokens_are_those_of_the_rendered_conversation():
    for template in (None, PLAIN):
        tokenizer = with_template(template)
        tokens, _ = encode_conversation(tokenizer, TWO_TURNS)
        assert tokens.tolist() == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)


def test_both_ways_of_telling_agree_with_transformers_own_mask():
    tokenizer = with_template()
    expected = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    tokens, mask = encode_conversation(tokenizer, TWO_TURNS)
    assert tokens.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]


def test_a_turn_end_outside_the_marked_block_is_learned_too():
    marked = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )
    assert learned(with_template(marked), TWO_TURNS) == ["2<|end|>", "4<|end|>"]


def test_a_last_turn_that_nothing_ends_gets_the_end_of_sequence():
    messages = talk((USER, "1+1="), (ASSISTANT, "2"))
    tokens, _ = encode_conversation(with_template(BARE), messages)
    assert make_tokenizer().decode(tokens) == "user: 1+1=\nassistant: 2\n<|end|>"
    assert learned(with_template(BARE), messages) == ["2\n<|end|>"]


def test_a_conversation_the_assistant_opens_is_learned_from_its_second_token():
    tokens, mask = encode_conversation(
        with_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"), talk((ASSISTANT, "ab"))
    )
    assert len(tokens) == 3
    assert mask.tolist() == [0, 1, 1]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_remedy():
    rewriting = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}..."
        "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(rewriting)
    assert learned(tokenizer, TWO_TURNS[:3]) == ["2<|end|>"]
    with pytest.raises(DataError, match=r"says in message 2 cannot be told.*{% generation %}"):
        encode_conversation(tokenizer, TWO_TURNS)


def test_a_conversation_without_the_assistant_is_refused():
    with pytest.raises(DataError, match="no assistant message to learn from, only system, user"):
        encode_conversation(with_template(), TWO_TURNS[:2])
