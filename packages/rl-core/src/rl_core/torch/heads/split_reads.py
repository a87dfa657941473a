"""Reads of whole rows if a rank's forward pass holds only part of the tokens, or of the vocabulary.

A backend with context parallelism gives each rank some positions of each row; the losses still see whole rows. Results,
a few numbers per token, are joined; hidden states are only if they are what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.model import Read
from rl_core.torch.heads.logprobs import Head
from rl_core.torch.heads.reads import following, position_reads
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.loss import Rows


def split_language_reads(
    hidden: Tensor,
    places: Tensor,
    rows: Rows,
    head: Head,
    reads: Sequence[Read],
    *,
    temperature: float,
    chunk_size: int,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    sums_hidden_grad: bool = True,
) -> dict[str, Tensor]:
    """Read as `rl_core.torch.heads.reads.language_reads` does, from the positions and the part of the head that this
    rank holds.

    Args:
        hidden: `[positions, hidden]`, after the model's last norm.
        places: Int64 `[positions]`, the index among the rows' tokens of each position; -1 for padding.
        rows: Whole rows, the same on all ranks of both groups, with the columns that the reads take.
        head: The whole head, or this rank's rows of it if there is a `shard`.
        reads: Reads of the head; each adds its columns to the result.
        temperature: Divides the logits.
        chunk_size: Number of positions whose logits exist at one time.
        shard: Place of this rank's rows in the head; None if it has the whole head.
        group: The ranks that hold all positions between them, each token once; None if this one does.
        sums_hidden_grad: As in `vocab_parallel_reads`.

    Returns:
        Columns of whole rows, the same on all ranks of both groups. The loss must be computed alike on each.
    """
    num_tokens = int(rows.offsets[-1])
    is_followed = torch.zeros(num_tokens + 1, dtype=torch.bool, device=places.device)
    is_followed[following(rows.offsets) - 1] = True
    positions = is_followed[places].nonzero()[:, 0]  # -1 is the entry past the end, which is never followed
    followers = places[positions] + 1
    found = position_reads(
        hidden[positions],
        head,
        rows,
        followers,
        reads,
        temperature=temperature,
        chunk_size=chunk_size,
        shard=shard,
        sums_hidden_grad=sums_hidden_grad,
    )
    return {name: join_tokens(column, followers, num_tokens, group) for name, column in found.items()}


def join_tokens(values: Tensor, places: Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> Tensor:
    """`[num_tokens, *inner]`: each rank's values at their places, those of all ranks of the group together.

    Tokens that no rank has are 0. The gradient goes back to the rank that has the token, unsummed: the loss is computed
    alike on every rank of the group.

    Args:
        values: `[positions, *inner]`.
        places: Int64 `[positions]`; positions at -1 are left out.
        num_tokens: Number of tokens of all rows.
        group: The ranks that hold all positions between them, each token once; None if this one does.
    """
    kept = (places >= 0).nonzero()[:, 0]
    spread = values.new_zeros((num_tokens, *values.shape[1:])).index_copy(0, places[kept], values[kept])
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
