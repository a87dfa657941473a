"""Stop strings, found while tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_CONTEXT_TOKENS = 5
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of these tokens."""


class StopText:
    """The text of one completion so far, decoded token by token, and whether a stop string has appeared in it.

    A token's text can depend on those before it, and a character can span tokens, so each is decoded together with the
    last finished piece of text, and the difference is what it adds.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], prompt: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._tokens = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._start = 0
        self._read = len(self._tokens)
        self._tail = ""
        self._keep = max(map(len, stop_strings)) - 1

    def append(self, token: int) -> bool:
        """Return whether a stop string is complete with this token."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return False
        self._start, self._read = self._read, len(self._tokens)
        window = self._tail + text[len(known) :]
        self._tail = window[-self._keep :] if self._keep else ""
        return any(stop in window for stop in self._stop_strings)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
