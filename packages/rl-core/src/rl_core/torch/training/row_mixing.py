"""Rows that lie end to end, each seen alone by a token mixer that carries a state (linear attention, Mamba)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def mix_each_row(mix: Callable[[Tensor], Tensor], tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mix the tokens of each row.

    Rows of similar lengths are mixed together, so that less than half of what is computed is padding, however different
    the rows are.

    Args:
        mix: Function from `[rows, longest, inputs]` to `[rows, longest, outputs]`. Rows are padded on the right, which
            no token of them may see.
        tokens: `[tokens, inputs]`.
        lengths: Lengths of the rows, in their order.

    Returns:
        `[tokens, outputs]`.
    """
    rows = tokens.split(list(lengths))
    similar: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        similar.setdefault((len(row) - 1).bit_length(), []).append(place)
    mixed = list(rows)
    for places in similar.values():
        padded = torch.nn.utils.rnn.pad_sequence([rows[place] for place in places], batch_first=True)
        for place, row in zip(places, mix(padded), strict=True):
            mixed[place] = row[: len(rows[place])]
    return torch.cat(mixed)
