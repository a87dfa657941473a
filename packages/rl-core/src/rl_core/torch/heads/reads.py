"""Reads of rows, from the hidden states of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from rl_core.batch import TOKENS
from rl_core.model import Read, Role, read_columns
from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.logprobs import Head, TokenReads, head_reads
from rl_core.torch.loss import Rows

READS_OF_ROLE: Mapping[Role, tuple[str, ...]] = {
    "policy": ("logprobs", "entropy", "collision", "topk", "logprobs_at"),
    "teacher": ("logprobs", "entropy", "collision", "topk", "logprobs_at"),
    "reward_model": ("scores",),
    "critic": ("values", "scores"),
}
"""Reads that the head of each role can answer."""

FILTERED_READS = ("logprobs", "entropy", "collision")
"""Reads of the distribution over the tokens that a filter keeps."""

ROW_READS = ("scores",)
"""Reads with one value per row; all others have one per token."""


def check_reads(role: Role, reads: Sequence[Read]) -> None:
    """Raise a `ValueError` naming the reads that a role's head cannot answer, or two of a kind that differ."""
    unknown = [read.name for read in reads if read.name not in READS_OF_ROLE[role]]
    if unknown:
        raise ValueError(f"a {role} cannot read {', '.join(unknown)}; it has {', '.join(READS_OF_ROLE[role])}")
    if len({(read.k, read.below) for read in reads if read.name == "topk"}) > 1:
        raise ValueError("one pass reads one topk; ask for the largest k")
    if len({read.column for read in reads if read.name == "logprobs_at"}) > 1:
        raise ValueError("one pass reads logprobs_at of one column; put all ids in one, `[tokens, k]`")
    if any(read.token_filter is not None for read in reads):
        whole = [read.name for read in reads if read.name not in FILTERED_READS]
        if whole:
            raise ValueError(f"{', '.join(whole)} cannot be read beside reads with a filter; take two passes")
        if len({read.token_filter for read in reads}) > 1:
            raise ValueError("all reads of a pass have the same filter; take a pass for each")


def language_reads(
    hidden: Tensor, rows: Rows, head: Head, reads: Sequence[Read], *, temperature: float, chunk_size: int
) -> dict[str, Tensor]:
    """Columns of `logprobs`, `entropy`, `collision`, `topk` and `logprobs_at`, each `[tokens]` or `[tokens, k]`; 0 at
    the first token of a row.

    Args:
        hidden: `[tokens, hidden]`, after the model's last norm.

    Raises:
        ValueError: for ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    follows = following(rows.offsets)
    found = head_reads(
        hidden[follows - 1],
        head,
        rows[TOKENS][follows],
        temperature=temperature,
        **read_options(rows, follows, reads, vocab_size=len(head.weight)),
        chunk_size=chunk_size,
    )
    return {name: _at(column, follows, len(hidden)) for name, column in columns_of(found, reads).items()}


class ReadOptions(TypedDict):
    """Reads of a pass over a head beside logprobs, as arguments of `head_reads` and `vocab_parallel_reads`."""

    entropy: bool
    collision: bool
    token_filter: TokenFilter | None
    k: int
    below: int
    ids: Tensor | None


def read_options(rows: Rows, places: Tensor, reads: Sequence[Read], *, vocab_size: int) -> ReadOptions:
    """Results that reads ask for at some tokens.

    Args:
        places: int64 `[n]`, indices of the tokens.

    Raises:
        ValueError: for ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    ids = None
    for name in read_columns(reads):
        _check_ids(name, rows[name], vocab_size)
        ids = rows[name][places].long()
    return ReadOptions(
        entropy=any(read.name == "entropy" for read in reads),
        collision=any(read.name == "collision" for read in reads),
        token_filter=next((read.token_filter for read in reads if read.token_filter is not None), None),
        k=max((read.k for read in reads), default=0),
        below=max((read.below for read in reads), default=0),
        ids=ids,
    )


def columns_of(found: TokenReads, reads: Sequence[Read]) -> dict[str, Tensor]:
    """Results by the names of the columns that the reads add."""
    columns = {**found._asdict(), "topk_ids": found.topk_ids.int()}
    return {name: columns[name] for read in reads for name in read.columns}


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
        raise ValueError(f"column {name!r} must hold ids as integers [tokens, k]; got {ids.dtype} {list(ids.shape)}")
    lowest, highest = int(ids.amin()), int(ids.amax())
    if lowest < -1 or highest >= vocab_size:
        raise ValueError(
            f"column {name!r} has ids from {lowest} to {highest}; the model has the ids 0 to {vocab_size - 1}, "
            "and -1 stands for none"
        )


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
