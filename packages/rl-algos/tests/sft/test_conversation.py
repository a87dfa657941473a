from itertools import groupby

import numpy as np
import pytest
import torch
from chat_templates import APPENDING, MARKED, THINKING, TURNS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_algos.losses.tokens import NLLLoss
from rl_algos.sft.conversation import encode_conversation
from rl_algos.tiny_model import make_tokenizer
from rl_algos.tokenizer import encode_prompt
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

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


def learned(tokenizer, messages, **options):
    """What lies under the loss, one string per run of tokens."""
    tokens, mask = encode_conversation(tokenizer, messages, **options)
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
    with pytest.raises(DataError, match=r"rewrites earlier turns, .* message 2 .*sft.learn: last"):
        encode_conversation(tokenizer, TWO_TURNS)


def test_a_conversation_without_the_assistant_is_refused():
    with pytest.raises(DataError, match=r"no assistant message .*only system, user"):
        encode_conversation(with_template(), TWO_TURNS[:2])


def expected(form, which=(0, 1)):
    """Tokens and mask, put together from the parts that are known of a format."""
    pieces = [form.tokenizer()(part, add_special_tokens=False)["input_ids"] for part in form.parts]
    under = {2 * turn + 1 for turn in which}
    mask = [np.full(len(piece), index in under) for index, piece in enumerate(pieces)]
    return np.concatenate(pieces), np.concatenate(mask)


def nll(tokens, mask, logprobs):
    """As the worker computes it."""
    loss, offsets = NLLLoss(), np.array([0, len(tokens)])
    batch = Batch({"tokens": Ragged(tokens, offsets), "loss_mask": Ragged(mask, offsets)})
    rows = Rows(torch.tensor(offsets), {"loss_mask": torch.tensor(mask)})
    return resolve(loss.implementation)(loss, {"logprobs": torch.tensor(logprobs)}, rows).loss(loss.totals(batch))


@pytest.mark.parametrize(("learn", "which"), [("all", (0, 1)), ("last", (1,))])
@pytest.mark.parametrize("name", APPENDING)
def test_the_loss_is_the_mean_over_the_known_parts_of_a_familys_format(name, learn, which):
    form = APPENDING[name]
    tokens, mask = encode_conversation(form.tokenizer(), TURNS, learn=learn)
    known, under = expected(form, which)
    assert tokens.tolist() == known.tolist()
    logprobs = -np.random.default_rng(0).exponential(size=len(known))
    assert nll(tokens, mask, logprobs).item() == pytest.approx(-logprobs[under].mean(), rel=1e-12)


def test_the_last_turn_is_learned_where_a_template_rewrites_the_turns_before_it():
    tokens, mask = encode_conversation(THINKING.tokenizer(), TURNS, learn="last")
    known, under = expected(THINKING, (0,))
    assert (tokens.tolist(), mask.tolist()) == (known.tolist(), under.tolist())
    with pytest.raises(DataError, match=r"rewrites earlier turns, .* message 1 .*sft.learn: last"):
        encode_conversation(THINKING.tokenizer(), TURNS)


def flagged(*flags, key="train"):
    return [message if flag is None else {**message, key: flag} for message, flag in zip(TURNS, flags, strict=True)]


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize(
    ("messages", "learn", "turns"),
    [
        pytest.param(flagged(None, False, None, None), "all", [1], id="one is left out [verl-project/verl#5316]"),
        (flagged(None, True, None, False), "all", [0]),
        (flagged(False, True, False, None), "last", [0, 1]),
        pytest.param(flagged(None, 0, None, 1, key="weight"), "all", [1], id="weights [axolotl-ai-cloud/axolotl#1703]"),
        *(
            pytest.param(flagged(None, False, None, True, key=key), "all", [1], id=key)
            for key in ("training", "trainable", "loss", "loss_mask", "step_loss_mask", "loss_scale")
        ),
    ],
)
def test_a_message_decides_for_itself_whether_it_is_learned(name, messages, learn, turns):
    form = APPENDING[name]
    tokens, mask = encode_conversation(form.tokenizer(), messages, learn=learn)
    known, under = expected(form, turns)
    assert (tokens.tolist(), mask.tolist()) == (known.tolist(), under.tolist())


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (flagged(True, None, None, None), r"message 0 .* its role is 'user'"),
        (flagged(None, False, None, False), "no assistant message is marked"),
        (flagged(None, "yes", None, None), r"message 1 \(from 0\): `train` must be true or false, got 'yes'"),
        pytest.param(
            flagged(None, 0.5, None, None, key="weight"),
            r"message 1 \(from 0\): `weight` must be 0 or 1, got 0.5",
            id="a weight between [huggingface/trl#5761]",
        ),
        ([*TURNS[:3], {**TURNS[3], "train": True, "weight": 1}], "message 3 .* has both `train` and `weight`"),
        pytest.param(flagged(None, [0, 1], None, None, key="loss_mask"), "`loss_mask` must be .*got", id="a mask"),
        *(
            pytest.param(flagged(None, value, None, None, key=key), f"`{key}` is not read; write `train", id=key)
            for key, value in (("train_detail", [{"begin_offset": 0}]), ("masked", True), ("mask", 1))
        ),
    ],
)
def test_flags_that_say_nothing_clear_are_refused(messages, says):
    with pytest.raises(DataError, match=says):
        encode_conversation(MARKED.tokenizer(), messages)


def test_a_block_around_several_messages_is_refused():
    once = "{% generation %}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% endgeneration %}"
    for messages in (TURNS, TURNS[:2]):
        with pytest.raises(DataError, match=r"cannot be matched|includes messages before it"):
            encode_conversation(with_template(once), messages)


def joining_tokenizer(template, newlines=r"\n+"):
    """A tokenizer whose tokens join white space and the word behind it, as those of real models do."""
    words = ["<pad>", "<|end|>", "user", "assistant", ":", " ", " yes", "yes", " hi", "hi", "\n", "\n\n", "!"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf" ?[a-z]+|{newlines}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>", chat_template=template
    )


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        pytest.param(BARE, "yes", "user : ▁hi ↵ assistant : ▁ [ yes ↵ <|end|>", id="space [Lightning-AI/litgpt#1567]"),
        pytest.param(
            "{% for m in messages %}{{ m.role + '\n' + m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}",
            "\nyes",
            "user ↵ hi <|end|> assistant ↵ [ ↵ yes <|end|>",
            id="newline [ohdearquant/lattice#1545]",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.role + ':' + m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
            " yes",
            "user : hi <|end|> assistant : [ ▁yes <|end|>",
            id="a space of the turn [unslothai/unsloth-zoo#832]",
        ),
    ],
)
def test_a_token_that_would_join_prompt_and_turn_is_split_as_generation_has_it(template, answer, expected):
    tokenizer = joining_tokenizer(template)
    messages = talk((USER, "hi"), (ASSISTANT, answer))
    tokens, mask = encode_conversation(tokenizer, messages)
    expected = [token.replace("▁", " ").replace("↵", "\n") for token in expected.split()]
    start = expected.index("[")
    assert tokenizer.convert_ids_to_tokens(tokens.tolist()) == [token for token in expected if token != "["]
    assert mask.tolist() == [int(index >= start) for index in range(len(tokens))]
    assert tokens[:start].tolist() == encode_prompt(tokenizer, messages[:1]).tolist()


def test_a_prompt_has_the_tokens_of_generation_whatever_follows_it():
    template = (
        "{% for m in messages %}{{ m.role + '\n\n' + m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
    )
    tokenizer = joining_tokenizer(template, newlines=r"\n+(?!\S)")  # as GPT-2 splits white space
    messages = talk((USER, "hi"), (ASSISTANT, "yes"))
    tokens, mask = encode_conversation(tokenizer, messages)
    assert tokens[: mask.argmax()].tolist() == encode_prompt(tokenizer, messages[:1]).tolist()
    assert tokenizer.convert_ids_to_tokens(tokens[mask == 1].tolist()) == ["yes", "<|end|>"]
