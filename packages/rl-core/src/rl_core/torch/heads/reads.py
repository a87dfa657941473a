"""Reads of rows, from the hidden states of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_core.batch import TOKENS
from rl_core.model import Read, Role
from rl_core.torch.heads.logprobs import Head, head_reads
from rl_core.torch.loss import Rows

READS_OF_ROLE: Mapping[Role, tuple[str, ...]] = {
    "policy": ("logprobs", "entropy", "topk"),
    "teacher": ("logprobs", "entropy", "topk"),
    "reward_model": ("scores",),
    "critic": ("values",),
}
"""Reads that the head of each role can answer."""

ROW_READS = ("scores",)
"""Reads with one value per row; all others have one per token."""


def check_reads(role: Role, reads: Sequence[Read]) -> None:
    """Raise a `ValueError` naming the reads that a role's head cannot answer, or two `topk` of different k."""
    unknown = [read.name for read in reads if read.name not in READS_OF_ROLE[role]]
    if unknown:
        raise ValueError(f"a {role} cannot read {', '.join(unknown)}; it has {', '.join(READS_OF_ROLE[role])}")
    if len({read.k for read in reads if read.name == "topk"}) > 1:
        raise ValueError("one pass reads one topk; ask for the largest k")


def language_reads(
    hidden: Tensor, rows: Rows, head: Head, reads: Sequence[Read], *, temperature: float, chunk_size: int
) -> dict[str, Tensor]:
    """Columns of `logprobs`, `entropy` and `topk`, each `[tokens]` or `[tokens, k]`; 0 at the first token of a row.

    Args:
        hidden: `[tokens, hidden]`, after the model's last norm.
    """
    follows = following(rows.offsets)
    k = max((read.k for read in reads), default=0)
    found = head_reads(
        hidden[follows - 1],
        head,
        rows[TOKENS][follows],
        temperature=temperature,
        entropy=any(read.name == "entropy" for read in reads),
        k=k,
        chunk_size=chunk_size,
    )
    columns = {
        "logprobs": found.logprobs,
        "entropy": found.entropy,
        "topk_logprobs": found.topk_logprobs,
        "topk_ids": found.topk_ids.int(),
    }
    wanted = [name for read in reads for name in read.columns]
    return {name: _at(columns[name], follows, len(hidden)) for name in wanted}


def value_reads(values: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Column `values` `[tokens]` from the value head's output `[tokens]`: at i that of the state before token i."""
    follows = following(rows.offsets)
    return {"values": _at(values.float()[follows - 1], follows, len(values))}


def score_reads(scores: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Column `scores` `[rows]` from the score head's output `[tokens]`: that at the last token of each row."""
    return {"scores": scores.float()[rows.offsets[1:] - 1]}


def following(offsets: Tensor) -> Tensor:
    """int64 indices of the tokens that follow another in their row: all but the first of each."""
    is_first = torch.zeros(int(offsets[-1]) + 1, dtype=torch.bool, device=offsets.device)
    is_first[offsets] = True
    return (~is_first[:-1]).nonzero()[:, 0]


def _at(values: Tensor, index: Tensor, num: int) -> Tensor:
    """`[num, *inner]`, the values at their indices and 0 elsewhere."""
    return values.new_zeros((num, *values.shape[1:])).index_copy(0, index, values)
