"""Limits of sampling to likely tokens, and to the tokens that a grammar allows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ALLOWED = "allowed_tokens"
"""Column of a batch, uint8 `[bytes of the row]`: the tokens that a grammar allowed at each token of the row, as
`allowed_row` writes them. A row that no grammar constrained has no bytes."""


@dataclass(frozen=True)
class TokenFilter:
    """Tokens that sampling may draw, of a distribution whose logits the temperature has divided.

    Four conditions, one after the other, as vLLM applies them; the remaining tokens are normalised again:

    1. `allowed`: one of the tokens that a grammar allowed there.
    2. `min_p`: at least this share of the probability of the most likely token.
    3. `top_k`: one of the k most likely.
    4. `top_p`: one of the fewest most likely tokens that hold this share of the mass after the others. The most
       likely token always stays.

    Args:
        top_k: 0 keeps all.
        top_p: In (0, 1]; 1 keeps all.
        min_p: In [0, 1]; 0 keeps all.
        allowed: True if the column `ALLOWED` has the tokens that a grammar allowed at each token.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    allowed: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def keeps_all(self) -> bool:
        """Return whether nothing is filtered out."""
        return not self.top_k and self.top_p == 1.0 and self.min_p == 0.0 and not self.allowed


def packed_set(words: np.ndarray) -> bytes:
    """Return a set of tokens as bytes, a few dozen for a set that is nearly empty or nearly full.

    Args:
        words: int32 `[words]`, a bit for each token id, the lowest first.
    """
    return zlib.compress(words.astype("<i4").tobytes(), 1)


def allowed_row(sets: Sequence[bytes]) -> np.ndarray:
    """Return the entry of a row in the column `ALLOWED`: the number of different sets, their sizes in bytes, the number
    of each token's set (0 allows all tokens), and the sets, each once.

    Args:
        sets: The `packed_set` of each token; empty for a token at which all were allowed.
    """
    numbers = {each: number for number, each in enumerate(dict.fromkeys((b"", *sets)))}
    if len(numbers) == 1:
        return np.zeros(0, np.uint8)
    distinct = list(numbers)[1:]
    header = np.array([len(distinct), *map(len, distinct), *map(numbers.__getitem__, sets)], "<i4")
    return np.frombuffer(header.tobytes() + b"".join(distinct), np.uint8)


def allowed_sets(rows: Iterable[np.ndarray], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Read entries of the column `ALLOWED`.

    Args:
        rows: Entry of each row.
        lengths: Number of tokens of each row.

    Returns:
        int32 `[tokens]`, the set of each token of all rows, and uint8 `[sets, bytes]`, a bit for each token id, the
        lowest first. Set 0 has all tokens.
    """
    numbers: dict[bytes, int] = {b"": 0}
    found = []
    for row, length in zip(rows, lengths, strict=True):
        if not len(row):
            found.append(np.zeros(length, np.int32))
            continue
        num_sets = int(row[:4].view("<i4")[0])
        header = row[: 4 * (1 + num_sets + length)].view("<i4")
        ends = header.nbytes + np.cumsum(header[1 : 1 + num_sets])
        packed = [each.tobytes() for each in np.split(row, [header.nbytes, *ends])[1:-1]]
        own = [numbers.setdefault(each, len(numbers)) for each in (b"", *packed)]
        found.append(np.array(own, np.int32)[header[1 + num_sets :]])
    unpacked = [np.frombuffer(zlib.decompress(each), np.uint8) for each in list(numbers)[1:]]
    bits = np.stack([np.full_like(unpacked[0], 0xFF), *unpacked]) if unpacked else np.zeros((1, 0), np.uint8)
    return np.concatenate(found), bits
