"""Texts of single tokens, whatever the tokenizer."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_algos.token_bytes import TokenTexts


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
