"""Rows in the layout of one forward pass of Megatron, and the way back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_core.data.batch import TOKENS
from rl_core.torch.heads.split_reads import HeldTokens
from rl_core.torch.host_arrays import to_device
from rl_core.torch.loss import Rows
from rl_core.torch.training.zigzag import zigzag_tokens

PADDING_ROW = 512
"""Minimum length at which padding is split into several rows."""


@dataclass(frozen=True)
class Alignment:
    """Numbers of which lengths must be multiples, and this rank's part of each row.

    Args:
        context_size, context_rank: among the ranks that share the tokens of each row.
        sequence_size: Ranks that share the tokens between layers (sequence parallelism).
        multiple: Number of which each rank's tokens must be a multiple, for its matrix products.
        budgets: Numbers of tokens to which packed microbatches are padded; none if they are as long as their rows.
    """

    context_size: int = 1
    context_rank: int = 0
    sequence_size: int = 1
    multiple: int = 1
    budgets: tuple[int, ...] = ()

    @property
    def row(self) -> int:
        """Number of which the length of each row must be a multiple, so that it can be cut into slices."""
        return row_multiple(self.context_size)

    @property
    def total(self) -> int:
        """Number of which the length of a sequence of the forward pass must be a multiple."""
        return self.row * self.sequence_size * self.multiple

    @property
    def lengths(self) -> list[int]:
        """Lengths of packed sequences in ascending order; none if they are as long as their rows."""
        return sorted({up(budget, self.total) for budget in self.budgets})

    def length_of(self, num_tokens: int) -> int:
        """Length of a packed sequence for rows of so many tokens: the smallest of the lengths, or a multiple of the
        largest if a group of rows that stay together exceeds its budget."""
        lengths = self.lengths or [self.total]
        return next((length for length in lengths if length >= num_tokens), up(num_tokens, lengths[-1]))


@dataclass(frozen=True)
class Layout:
    """This rank's tokens of some rows.

    Args:
        input_ids: Int64 `[batch, seq]`; packed rows lie end to end in `[1, tokens]`.
        position_ids: Int64, of the same shape.
        places: Int64 `[batch * seq]`, the index among the rows' tokens of each position, -1 for padding.
        held: The tokens of the positions.
        packing: Megatron's description of packed rows; None if padded.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    held: HeldTokens
    packing: PackedSeqParams | None


def lay_out(rows: Rows, alignment: Alignment, *, packed: bool) -> Layout:
    """The layout of a microbatch; rows are padded as far as the alignment demands. Everything follows from their
    lengths, on the host."""
    offsets, device = rows.host_offsets, rows.offsets.device
    starts, lengths = offsets[:-1].tolist(), np.diff(offsets).tolist()
    if packed:
        places = _packed_places(starts, lengths, alignment)
    else:
        width = up(max(lengths), alignment.total)
        places = [_row_places(start, length, width) for start, length in zip(starts, lengths, strict=True)]
    own = [
        (place, zigzag_tokens(len(place), alignment.context_size, alignment.context_rank).numpy()) for place in places
    ]
    join = np.concatenate if packed else np.stack
    place = join([place[index] for place, index in own])
    position = join([index for _, index in own])
    place, position = place.reshape(-1, place.shape[-1]), position.reshape(-1, position.shape[-1])
    held = HeldTokens.arrays(place.reshape(-1), offsets)
    bounds = np.cumsum([0, *(len(row) for row in places)], dtype=np.int32)
    at, position_ids, ends, *found = to_device([place, position, bounds, *held], device)
    ids = rows[TOKENS][at.clamp(min=0)].masked_fill(at < 0, 0)
    packing = _packing(ends, max(len(row) for row in places)) if packed else None
    return Layout(ids, position_ids, at.flatten(), HeldTokens(*found), packing)


def _packed_places(starts: list[int], lengths: list[int], alignment: Alignment) -> list[np.ndarray]:
    places = [
        _row_places(start, length, up(length, alignment.row)) for start, length in zip(starts, lengths, strict=True)
    ]
    total = sum(len(place) for place in places)
    missing = alignment.length_of(total) - total
    # rows of padding, no longer than others, as attention takes quadratic time
    longest = up(max(PADDING_ROW, *(len(place) for place in places)), alignment.row)
    return [*places, *(np.full(min(longest, missing - start), -1) for start in range(0, missing, longest))]


def _row_places(start: int, length: int, width: int) -> np.ndarray:
    places = np.full(width, -1)
    places[:length] = np.arange(start, start + length)
    return places


def _packing(ends: Tensor, longest: int) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def row_multiple(context_size: int) -> int:
    """Return the number of which the length of each row must be a multiple on so many context-parallel ranks."""
    return 2 * context_size if context_size > 1 else 1


def up(length: int, multiple: int) -> int:
    """Return a length rounded up to a multiple."""
    return -(-length // multiple) * multiple
