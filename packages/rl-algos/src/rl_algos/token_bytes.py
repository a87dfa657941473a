"""The bytes of text of each token of a tokenizer."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tokenizers import models

BytesOf = Callable[[int], bytes]
"""From a token id to the bytes of its text."""


def exact_bytes(tokenizer: Any) -> BytesOf | None:
    """Return the bytes of each token of a fast tokenizer, which make up the text of any tokens if they are joined.

    None unless the tokenizer is byte-level or has byte fallback; in others, a token's text depends on its neighbours.
    """
    kinds = decoder_steps(tokenizer)
    to_bytes = next((found for kind, found in _BYTES.items() if kind in kinds), None)
    if to_bytes is None or (to_bytes is str.encode and kinds != {"Fuse"}):
        return None
    special = {number: str(token).encode() for number, token in tokenizer.added_tokens_decoder.items()}

    def of(number: int) -> bytes:
        return special[number] if number in special else to_bytes(tokenizer.convert_ids_to_tokens(number))

    return of


def ends_of(mark: str, tokens: Sequence[int], bytes_of: BytesOf) -> tuple[int, ...]:
    """Return the places of the tokens that have the last byte of a string, and the place of the last token, in order.

    Args:
        mark: String that ends a part of the text.
        tokens: Token ids, at least one.
        bytes_of: Bytes of each token.
    """
    pieces = [bytes_of(token) for token in tokens]
    ends, whole = list(accumulate(map(len, pieces))), b"".join(pieces)
    at, found = 0, {len(tokens) - 1}
    while (at := whole.find(mark.encode(), at)) >= 0:
        at += len(mark.encode())
        found.add(bisect_left(ends, at))
    return tuple(sorted(found))


def decoder_steps(tokenizer: Any) -> set[str]:
    """Return the types of the steps of a fast tokenizer's decoder."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": "Fuse"}
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def characters_per_token(tokenizer: Any) -> float:
    """Return the maximum number of characters of one token of a fast tokenizer; infinity if the tokenizer may drop
    characters, or have one token for any number of unknown ones."""
    backend = tokenizer.backend_tokenizer
    steps = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    added = tokenizer.added_tokens_decoder.values()
    if (
        not _keeps_unknown(backend.model, steps)
        or not all(map(_keeps_characters, steps))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return math.inf
    # A composed character may replace up to four.
    composes = any(step["type"] in ("NFC", "NFKC") for step in steps)
    return max(map(len, tokenizer.get_vocab())) * (4 if composes else 1)


def _keeps_unknown(model: Any, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each character that is not in the vocabulary has a token, or tokens of its bytes."""
    is_bpe = isinstance(model, models.BPE)
    if is_bpe and (model.byte_fallback or any(step["type"] == "ByteLevel" for step in steps)):
        return True
    splits = any(step.get("pattern") == {"Regex": r"[\s\S]"} and step["behavior"] == "Isolated" for step in steps)
    is_single = (is_bpe and not model.fuse_unk) or (splits and isinstance(model, models.BPE | models.WordLevel))
    return is_single and model.unk_token is not None


def _steps(component: Any, parts: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a pre-tokenizer."""
    if component is not None:
        described = json.loads(component.__getstate__())
        yield from described.get(parts, [described])


def _keeps_characters(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return 0 < len(step["pattern"].get("String", "")) <= len(step["content"])
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


_KEEPING = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel"),
    *("Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts"),
}
"""Types of steps that drop no character."""


class TokenTexts:
    """The text of single tokens, for people to read.

    Args:
        tokenizer: Fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._exact = exact_bytes(tokenizer)
        self._special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._size = len(tokenizer)

    def text(self, number: int) -> bytes | None:
        """UTF-8 of the text of a token, which may be a part of a character; None for an id without a token, such as
        those that only pad a vocabulary."""
        if not 0 <= number < self._size or self._tokenizer.convert_ids_to_tokens(number) is None:
            return None
        if self._exact is not None:
            return self._exact(number)
        return str(self._tokenizer.decode([number])).encode(errors="replace")

    def is_special(self, number: int) -> bool:
        """Return whether a token is a special one, such as the end of a turn."""
        return number in self._special


def _of_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _plain_of_byte_level() -> dict[str, int]:
    """Map the characters that byte-level tokenizers write bytes as (GPT-2) to these bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


_PLAIN = _plain_of_byte_level()
_BYTES: Mapping[str, Callable[[str], bytes]] = {
    "ByteLevel": lambda token: bytes(_PLAIN[character] for character in token),
    "ByteFallback": _of_byte_fallback,
    "Fuse": str.encode,
}
"""Functions from the text of a token to its bytes, by a step of a tokenizer's decoder."""
