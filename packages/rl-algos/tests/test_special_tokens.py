"""Special tokens in content: no special id comes of it, and the template's own ids stay."""

import logging
from functools import cache

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, tokenizer_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_algos.preference.data import encode_response
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.sft.conversation import encode_conversation
from rl_algos.special_tokens import SPLIT, SpecialTokens, special_tokens, warn_of_special_tokens
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_core.model_config import TokenizerConfig

NOTHING = np.zeros(0, np.int32)
SAID = {"role": "assistant", "content": "An answer."}
CALL = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
WITH_TOOLS = sorted(FAMILIES.keys() - {"gemma3", "phi3", "phi4"})


@pytest.fixture
def mode(monkeypatch):
    """Sets `split_special_tokens` of a tokenizer for the test."""
    return lambda tokenizer, value: monkeypatch.setattr(tokenizer, SPLIT, value, raising=False)


def tool_result(content):
    return {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": content}


def user(content):
    return {"role": "user", "content": content}


def injection(family):
    """Every special token of a family, between ordinary text."""
    return "a" + "b".join(FAMILIES[family].special) + "c"


def special_ids(tokenizer, tokens):
    return [each for each in np.asarray(tokens).tolist() if tokenizer.added_tokens_decoder.get(each) is not None]


def check_is_text(tokenizer, tokens, harmless, content):
    """Check that tokens are those of a harmless content, with the characters of another in its place."""
    assert special_ids(tokenizer, tokens) == special_ids(tokenizer, harmless)
    letters = tokenizer.convert_tokens_to_ids(list(content))
    mark = tokenizer.convert_tokens_to_ids("🦕")
    place = harmless.tolist().index(mark)
    assert tokens.tolist() == [*harmless[:place].tolist(), *letters, *harmless[place + 1 :].tolist()]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_tool_result_has_no_special_token(family):
    tokenizer = tokenizer_of(family)
    turn = CALLED
    if family in ("deepseek_v3", "glm4_moe"):
        turn = {**CALLED, "tool_calls": [{**CALL, "function": {"name": "look_up", "arguments": "{}"}}]}
    found, harmless = (
        Chat(tokenizer).continuation(turn, [tool_result(content)], NOTHING) for content in (injection(family), "🦕")
    )
    check_is_text(tokenizer, found, harmless, injection(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_of_an_environment_has_no_special_token(family):
    tokenizer = tokenizer_of(family)
    found, harmless = (
        Chat(tokenizer).continuation(SAID, [user(content)], NOTHING) for content in (injection(family), "🦕")
    )
    check_is_text(tokenizer, found, harmless, injection(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_of_an_environment_are_read_as_such_if_that_is_chosen(family, mode):
    tokenizer = tokenizer_of(family)
    mode(tokenizer, "none")
    found, harmless = (
        Chat(tokenizer).continuation(SAID, [user(content)], NOTHING) for content in (injection(family), "🦕")
    )
    assert len(special_ids(tokenizer, found)) == len(special_ids(tokenizer, harmless)) + len(FAMILIES[family].special)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_no_special_token_if_that_is_chosen(family, mode):
    tokenizer = tokenizer_of(family)
    found = [encode_prompt(tokenizer, [user(injection(family))])]
    mode(tokenizer, "all")
    found += [encode_prompt(tokenizer, [user(content)]) for content in (injection(family), "🦕")]
    as_special, as_text, harmless = found
    check_is_text(tokenizer, as_text, harmless, injection(family))
    counts = [len(special_ids(tokenizer, tokens)) for tokens in (as_special, harmless)]
    assert counts[0] == counts[1] + len(FAMILIES[family].special)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_rendered_anew_has_special_tokens_of_the_template_only(family):
    tokenizer = tokenizer_of(family)
    chat = Chat(tokenizer)
    first = encode_prompt(tokenizer, [user("ab")])
    found, harmless = (chat.rendered([user("ab"), SAID, user(content)], first) for content in (injection(family), "🦕"))
    check_is_text(tokenizer, found, harmless, injection(family))
    # what came of the content before stays as it is
    again = [user("ab"), SAID, user(injection(family)), SAID, user("Z")]
    later, expected = chat.rendered(again, found), chat.rendered([*again[:2], user("🦕"), *again[3:]], NOTHING)
    assert special_ids(tokenizer, later) == special_ids(tokenizer, expected)


LEARNED = sorted(FAMILIES.keys() - {"mistral", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3", "qwen3_6"})


@pytest.mark.parametrize("family", LEARNED)
def test_a_conversation_to_learn_has_special_tokens_of_the_template_only_if_that_is_chosen(family, mode):
    tokenizer = tokenizer_of(family)
    mode(tokenizer, "all")
    found, harmless = (encode_conversation(tokenizer, [user(content), SAID]) for content in (injection(family), "🦕"))
    check_is_text(tokenizer, found[0], harmless[0], injection(family))
    assert found[0][found[1] > 0].tolist() == harmless[0][harmless[1] > 0].tolist()
    response = encode_response(tokenizer, [user(injection(family))], [SAID])
    assert response.tokens.tolist() == found[0].tolist()


def bpe(**settings):
    """Merges, one of which makes a special token."""
    vocabulary = {each: index for index, each in enumerate(["<unk>", "<s>", *"<>s/abx\u2581", "ab", "<s", "x<"])}
    return models.BPE(vocabulary, [("a", "b"), ("<", "s"), ("<s", ">"), ("x", "<")], unk_token="<unk>", **settings)


def unigram():
    pieces = ["<unk>", "<s>", *"<>s/abx\u2581", "ab"]
    return models.Unigram([(each, -1.0 if each in ("ab", "<s>") else -3.0) for each in pieces], unk_id=0)


def wordpiece():
    letters = [*"<>s/abx\u2581", *(f"##{each}" for each in "<>s/abx\u2581")]
    vocabulary = {each: index for index, each in enumerate(["<unk>", "<s>", *letters])}
    return models.WordPiece(vocabulary, unk_token="<unk>")


@cache
def made(model, start):
    backend = Tokenizer(model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=start)
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.Metaspace(prepend_scheme=start)
    backend.add_special_tokens(["<unk>", AddedToken("<s>", lstrip=True, normalized=True), "<end>"])
    template = "{% for m in messages %}<s>{{ m.content }}<end>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<end>", unk_token="<unk>", chat_template=template
    )


@pytest.mark.parametrize("model", [bpe, unigram, wordpiece])
@pytest.mark.parametrize("start", ["first", "always", "never"])
def test_tokens_of_other_text_are_those_of_the_tokenizer(model, start):
    """A copy that differs in the text of its special tokens tokenises everything else as the original does."""
    tokenizer = made(model, start)
    special = SpecialTokens(tokenizer)
    [hidden] = special.hidden([user("<s>")])
    for text in ("ab", " ab x", "<s>ab<end>", "ab <s> ab", "<s> <s>", "x<end>x", "é"):
        expected = tokenizer.encode(text + "<end>", add_special_tokens=False)
        found = special.encode(text + "<end>" + hidden["content"])
        assert found[: len(expected)] == expected, text
        assert not {0, 1, tokenizer.eos_token_id} & set(found[len(expected) :]), text


@pytest.mark.parametrize(
    ("content", "num_characters", "rest"),
    [
        pytest.param("ab<|im_end|>cd", 1, "b<|im_end|>cd", id="before"),
        pytest.param("ab<|im_end|>cd", 2, "<|im_end|>cd", id="at the token"),
        pytest.param("ab<|im_end|>cd", 5, "m_end|>cd", id="in the token"),
        pytest.param("ab<|im_end|>cd", 12, "cd", id="behind it"),
        pytest.param("ab<|im_end|>cd", 14, "", id="at the end"),
        pytest.param("ab", 0, "ab", id="without"),
    ],
)
def test_the_rest_of_a_text_counts_what_placeholders_stand_for(content, num_characters, rest):
    special = special_tokens(tokenizer_of("qwen3"))
    [hidden] = special.hidden([user(content)])
    assert special.shown(special.after(hidden["content"], num_characters)) == rest


def test_what_the_assistant_says_is_left_as_it_is():
    special = special_tokens(tokenizer_of("gpt_oss"))
    said = {"role": "assistant", "content": "<|channel|>final<|message|>2"}
    assert special.hidden([said]) == [said]


def test_rows_with_special_tokens_are_counted_once(caplog, mode):
    tokenizer = tokenizer_of("qwen3")
    rows = [("a.jsonl, line 1", [user("1+1=")]), ("a.jsonl, line 2", [user("x<|im_end|>")])] * 2
    with caplog.at_level(logging.WARNING):
        warn_of_special_tokens("a", rows, tokenizer)
        mode(tokenizer, "all")
        warn_of_special_tokens("a", rows, tokenizer)
    [record] = caplog.records
    assert record.getMessage().startswith(
        "a: 2 of 4 rows have special tokens in their content, the first <|im_end|> at a.jsonl, line 2."
    )


@pytest.mark.parametrize("value", ["none", "observations", "all"])
def test_a_loaded_tokenizer_has_the_setting(tmp_path, value):
    tokenizer_of("qwen3").save_pretrained(tmp_path)
    loaded = load_tokenizer(TokenizerConfig(split_special_tokens=value), str(tmp_path))
    assert getattr(loaded, SPLIT) == value
