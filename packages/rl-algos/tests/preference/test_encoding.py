import pytest

from rl_algos.preference.data import encode_response
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import DataError

USER = {"role": "user", "content": "1+1="}
TWO = {"role": "assistant", "content": "2"}
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def said(tokenizer, encoded):
    return tokenizer.decode(encoded.tokens[encoded.loss_mask == 1])


@pytest.mark.parametrize("template", [None, PLAIN])
def test_the_mask_is_on_the_response_and_not_on_earlier_turns(template):
    tokenizer = with_template(template)
    encoded = encode_response(tokenizer, [USER, TWO, USER], [TWO])
    assert tokenizer.decode(encoded.tokens).count("2") == 2
    assert said(tokenizer, encoded) == "2<|end|>"
    assert encoded.loss_mask[-3:].any()


def test_a_response_of_several_turns_leaves_out_what_others_say():
    tokenizer = with_template(None)
    assert said(tokenizer, encode_response(tokenizer, [USER], [TWO, USER, TWO])) == "2<|end|>2<|end|>"


def test_a_response_to_nothing_is_encoded():
    tokenizer = with_template(None)
    assert said(tokenizer, encode_response(tokenizer, [], [TWO])).endswith("2<|end|>")


def test_a_template_that_renders_the_prompt_anew_is_refused():
    rewriting = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else '...' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(DataError, match="renders the messages before message 3"):
        encode_response(with_template(rewriting), [USER, TWO, USER], [TWO])
