"""Rows in the layout of one forward pass of Megatron, and the way back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_core.data.batch import TOKENS
from rl_core.torch.heads.reads import HeldTokens
from rl_core.torch.host_arrays import to_device
from rl_core.torch.loss import Rows
from rl_core.torch.rows import zigzag_tokens

PADDING_ROW = 512
"""Minimum length of padding that is split into several rows."""


@dataclass(frozen=True)
class Alignment:
    """Divisors of the lengths of rows and sequences, and this rank's part of each row.

    Args:
        context_size: Number of ranks that share the tokens of each row.
        context_rank: Number of this rank among them.
        sequence_size: Ranks that share the tokens between layers (sequence parallelism).
        multiple: Divisor of each rank's number of tokens, for its matrix products.
        budgets: Lengths for packed microbatches, which are padded; none if they are as long as their rows.
    """

    context_size: int = 1
    context_rank: int = 0
    sequence_size: int = 1
    multiple: int = 1
    budgets: tuple[int, ...] = ()

    @property
    def row(self) -> int:
        """Divisor of the length of each row, so that it can be cut into slices."""
        return row_multiple(self.context_size)

    @property
    def total(self) -> int:
        """Divisor of the length of a sequence of the forward pass."""
        return self.row * self.sequence_size * self.multiple

    @property
    def lengths(self) -> list[int]:
        """Lengths of packed sequences in ascending order; none if they are as long as their rows."""
        return sorted({up(budget, self.total) for budget in self.budgets})

    def length_of(self, num_tokens: int) -> int:
        """Return the length of a packed sequence for rows with this number of tokens: the smallest of the lengths that
        holds them, or a multiple of the largest if a group of rows that stay together exceeds its budget."""
        lengths = self.lengths or [self.total]
        return next((length for length in lengths if length >= num_tokens), up(num_tokens, lengths[-1]))


@dataclass(frozen=True)
class RowLayout:
    """This rank's tokens of some rows.

    Args:
        input_ids: Int64 `[batch, seq]`; packed rows are end to end in `[1, tokens]`.
        position_ids: Int64, the same shape.
        places: Int64 `[batch * seq]`, the index among the rows' tokens of each position, -1 for padding.
        held: The tokens of the positions.
        packing: Megatron's description of packed rows; None if padded.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    held: HeldTokens
    packing: PackedSeqParams | None


def lay_out(rows: Rows, alignment: Alignment, *, packed: bool) -> RowLayout:
    """Return the layout of a microbatch; rows are padded as far as the alignment demands. Everything follows from their
    lengths, on the host."""
    offsets, device = rows.host_offsets, rows.offsets.device
    starts, lengths = offsets[:-1].tolist(), np.diff(offsets).tolist()
    if packed:
        widths = [up(length, alignment.row) for length in lengths]
    else:
        widths = [up(max(lengths), alignment.total)] * len(lengths)
    places = [np.full(width, -1) for width in widths]
    for place, start, length in zip(places, starts, lengths, strict=True):
        place[:length] = np.arange(start, start + length)
    if packed:
        # Rows of padding are no longer than others, because attention takes quadratic time.
        missing = sequence_length(offsets, alignment) - sum(widths)
        longest = up(max(PADDING_ROW, *widths), alignment.row)
        places += [np.full(min(longest, missing - start), -1) for start in range(0, missing, longest)]
    own = [zigzag_tokens(len(place), alignment.context_size, alignment.context_rank).numpy() for place in places]
    join = np.concatenate if packed else np.stack
    here = join([place[index] for place, index in zip(places, own, strict=True)])
    position = join(own)
    here, position = here.reshape(-1, here.shape[-1]), position.reshape(-1, position.shape[-1])
    held = HeldTokens.arrays(here.reshape(-1), offsets)
    bounds = np.cumsum([0, *(len(row) for row in places)], dtype=np.int32)
    at, position_ids, ends, *found = to_device([here, position, bounds, *held], device)
    ids = rows[TOKENS][at.clamp(min=0)].masked_fill(at < 0, 0)
    packing = None
    if packed:
        most = max(len(row) for row in places)
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=most, max_seqlen_kv=most
        )
    return RowLayout(ids, position_ids, at.flatten(), HeldTokens(*found), packing)


def sequence_length(offsets: np.ndarray, alignment: Alignment) -> int:
    """Return the length of the sequence of packed rows, on all context-parallel ranks together.

    Args:
        offsets: Int64 `[rows + 1]`, places of the rows among their tokens.
        alignment: Alignment of sequences.
    """
    return alignment.length_of(sum(up(length, alignment.row) for length in np.diff(offsets).tolist()))


def row_multiple(context_size: int) -> int:
    """Return the divisor of the length of each row on this number of context-parallel ranks."""
    return 2 * context_size if context_size > 1 else 1


def up(length: int, multiple: int) -> int:
    """Return a length rounded up to a multiple."""
    return -(-length // multiple) * multiple
