"""Reads of whole rows if a rank's forward pass holds only part of the tokens, or of the vocabulary.

A backend with context parallelism gives each rank some positions of each row; the losses still see whole rows. Results,
a few numbers per token, are joined; hidden states are only if they are what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.model import Read
from rl_core.torch.heads.logprobs import Head
from rl_core.torch.heads.reads import position_reads
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.loss import Rows, followers_of


@dataclass(frozen=True)
class HeldTokens:
    """The tokens of some rows that a rank's forward pass has, and where.

    Args:
        positions: Int64 `[n]`, the positions that hold a token.
        tokens: Int64 `[n]`, the index among the rows' tokens of each.
        followed: Int64 `[m]`, the positions whose token is followed by another of its row.
        followers: Int64 `[m]`, the index among the rows' tokens of each that follows.
    """

    positions: Tensor
    tokens: Tensor
    followed: Tensor
    followers: Tensor

    @staticmethod
    def arrays(places: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        """The fields in order, on the host.

        Args:
            places: Int64 `[positions]`, the index among the rows' tokens of each position; -1 for padding.
            offsets: Where each row starts and ends among the tokens.
        """
        positions = np.flatnonzero(places >= 0)
        tokens = places[positions]
        is_followed = np.zeros(int(offsets[-1]), dtype=bool)
        is_followed[followers_of(offsets) - 1] = True
        reads = is_followed[tokens]
        return [positions, tokens, positions[reads], tokens[reads] + 1]


def split_language_reads(
    hidden: Tensor,
    held: HeldTokens,
    rows: Rows,
    head: Head,
    reads: Sequence[Read],
    *,
    temperature: float,
    chunk_size: int | None,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    sums_hidden_grad: bool = True,
) -> dict[str, Tensor]:
    """Read as `rl_core.torch.heads.reads.language_reads` does, from the positions and the part of the head that this
    rank holds.

    Args:
        hidden: `[positions, hidden]`, after the model's last norm.
        held: The tokens of the positions.
        rows: Whole rows, the same on all ranks of both groups, with the columns that the reads take.
        head: The whole head, or this rank's rows of it if there is a `shard`.
        reads: Reads of the head; each adds its columns to the result.
        temperature: Divides the logits.
        chunk_size: Number of positions whose logits exist at one time; None for `chunk_size_of`.
        shard: Place of this rank's rows in the head; None if it has the whole head.
        group: The ranks that hold all positions between them, each token once; None if this one does.
        sums_hidden_grad: As in `vocab_parallel_reads`.

    Returns:
        Columns of whole rows, the same on all ranks of both groups. The loss must be computed alike on each.
    """
    found = position_reads(
        hidden[held.followed],
        head,
        rows,
        held.followers,
        reads,
        temperature=temperature,
        chunk_size=chunk_size,
        shard=shard,
        sums_hidden_grad=sums_hidden_grad,
    )
    return {name: join_tokens(column, held.followers, rows.num_tokens, group) for name, column in found.items()}


def join_tokens(values: Tensor, tokens: Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> Tensor:
    """`[num_tokens, *inner]`: each rank's values at their places, those of all ranks of the group together.

    Tokens that no rank has are 0. The gradient goes back to the rank that has the token, unsummed: the loss is computed
    alike on every rank of the group.

    Args:
        values: `[n, *inner]`.
        tokens: Int64 `[n]`, the index among the rows' tokens of each value.
        num_tokens: Number of tokens of all rows.
        group: The ranks that hold all positions between them, each token once; None if this one does.
    """
    spread = values.new_zeros((num_tokens, *values.shape[1:])).index_copy(0, tokens, values)
    joined: Tensor = spread if group is None else _Join.apply(spread, group)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        joined = values.clone()
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
