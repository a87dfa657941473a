"""Texts of single tokens, whatever the tokenizer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_algos.tiny_model import make_tokenizer
from rl_algos.token_bytes import TokenTexts, characters_per_token


def byte_level():
    pieces = {piece: number for number, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"])}
    tokenizer = Tokenizer(models.BPE(pieces, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


def test_the_texts_of_tokens_make_up_the_text_and_special_ones_are_known():
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    ids = tokenizer("né a\n\u20ac<think><|end|>", add_special_tokens=False)["input_ids"]
    pieces = [texts.text(number) for number in ids]
    assert b"".join(pieces).decode() == "né a\n\u20ac<think><|end|>"
    assert b" a" in pieces
    assert b"\xe2" in pieces
    assert [texts.is_special(number) for number in ids[-2:]] == [False, True]


def test_an_id_without_a_token_has_no_text():
    texts = TokenTexts(byte_level())
    assert texts.text(10_000) is None
    assert not texts.is_special(10_000)


def test_a_tokenizer_whose_bytes_are_not_known_gives_what_it_decodes():
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))
    assert [texts.text(number) for number in range(3)] == [b"a", b"##b", b"[UNK]"]
    assert texts.is_special(2)


def pretrained(model, *, normalizer=None, pre_tokenizer=None, added=()):
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    made.add_tokens(list(added))
    return made


def bpe(**settings):
    return models.BPE({"a": 0, "b": 1, " ": 2, "aa": 3, "<unk>": 4, "é": 5}, [("a", "a")], **settings)


BOUNDED = {
    "byte level": byte_level(),
    "unknown ones are tokens each": pretrained(bpe(unk_token="<unk>")),
    "composed": pretrained(bpe(unk_token="<unk>"), normalizer=normalizers.NFC()),
    "single characters": make_tokenizer(),
}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.text(alphabet="aab é\u0301e\n世😀", max_size=60))
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(kind, text):
    tokenizer = BOUNDED[kind]
    characters = characters_per_token(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(text) <= characters * len(ids)


UNBOUNDED = {
    "unknown words": pretrained(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "unknown ones dropped": pretrained(bpe()),
    "unknown runs": pretrained(bpe(unk_token="<unk>", fuse_unk=True)),
    "pieces": pretrained(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "spaces dropped": pretrained(bpe(unk_token="<unk>"), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "split and removed": pretrained(bpe(unk_token="<unk>"), pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "stripped": pretrained(
        bpe(unk_token="<unk>"), normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    ),
    "runs replaced": pretrained(bpe(unk_token="<unk>"), normalizer=normalizers.Replace(Regex(" +"), " ")),
    "spaces swallowed": pretrained(bpe(unk_token="<unk>"), added=[AddedToken("<x>", rstrip=True)]),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_drops_characters_has_no_bound(kind):
    assert characters_per_token(UNBOUNDED[kind]) == math.inf
