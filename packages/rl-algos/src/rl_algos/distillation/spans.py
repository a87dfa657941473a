"""Spans of text that the tokens of two tokenizers have in common.

Tokens of both are compared by the bytes of the text that they stand for, so that characters which several tokens make
up need no care. A span is as short as can be: it begins and ends where a token of either tokenizer begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rl_algos.token_bytes import BytesOf, decoder_steps, exact_bytes
from rl_core.errors import ConfigError


class Span(NamedTuple):
    """Tokens of two tokenizers that stand for the same bytes.

    Args:
        student: Its tokens, as a half-open range.
        teacher: Likewise.
    """

    student: tuple[int, int]
    teacher: tuple[int, int]


def common_spans(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[Span]:
    """The shortest spans that cover a text, given the bytes of each token of both tokenizers; both make up the text."""
    spans: list[Span] = []
    ends = [0, 0]  # bytes up to the current tokens' ends
    at = [0, 0]  # tokens taken
    start = (0, 0)
    while at[0] < len(student) or at[1] < len(teacher):
        side = 0 if at[1] == len(teacher) or (at[0] < len(student) and ends[0] <= ends[1]) else 1
        ends[side] += len((student, teacher)[side][at[side]])
        at[side] += 1
        if ends[0] == ends[1] and at[0] > start[0] and at[1] > start[1]:
            spans.append(Span((start[0], at[0]), (start[1], at[1])))
            start = (at[0], at[1])
    return spans


def bytes_of(tokenizer: Any, key: str) -> BytesOf:
    """The bytes that each token of a fast tokenizer stands for.

    Args:
        tokenizer: Fast tokenizer, byte-level or with byte fallback.
        key: Key of the model whose tokenizer it is, for messages.

    Raises:
        ConfigError: If its tokens cannot be told apart by bytes.
    """
    of = exact_bytes(tokenizer)
    if of is None:
        raise ConfigError(
            f"{key}: the bytes of this tokenizer's tokens are not known (its decoder is "
            f"{', '.join(sorted(decoder_steps(tokenizer)))}); distillation.cross_tokenizer supports byte-level "
            "tokenizers, and tokenizers with byte fallback"
        )
    return of


def whole_text(pieces: Sequence[bytes]) -> tuple[str, int]:
    """The text that tokens make up, and how many of them do: those at the end that begin a character and do not finish
    it are left out."""
    for count in range(len(pieces), 0, -1):
        try:
            return b"".join(pieces[:count]).decode(), count
        except UnicodeDecodeError:
            continue
    return "", 0
