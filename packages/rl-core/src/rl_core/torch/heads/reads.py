"""Reads of rows, from the hidden states of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_core.data.batch import TOKENS
from rl_core.model import HeadFiles, Read, Role, read_columns
from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.divergences import Other, divergences
from rl_core.torch.heads.head_files import read_head
from rl_core.torch.heads.head_pass import wide_dtype
from rl_core.torch.heads.logprobs import Head, TokenReads, head_reads
from rl_core.torch.heads.vocab_parallel import VocabShard, vocab_parallel_reads
from rl_core.torch.loss import Rows

LANGUAGE_READS = ("logprobs", "entropy", "collision", "topk", "logprobs_at", "hidden", "divergences")
"""Reads that a language-model head can answer."""

READS_OF_ROLE: Mapping[Role, tuple[str, ...]] = {
    "policy": LANGUAGE_READS,
    "teacher": LANGUAGE_READS,
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
        raise ValueError("a pass can read only one topk; request the largest k")
    if len({read.column for read in reads if read.name == "logprobs_at"}) > 1:
        raise ValueError("a pass can read logprobs_at of only one column; put all ids in one column, `[tokens, k]`")
    if sum(read.name == "divergences" for read in reads) > 1:
        raise ValueError("a pass can read the divergences only once; list the heads of all other models in one read")
    if any(read.token_filter is not None for read in reads):
        whole = [read.name for read in reads if read.name not in FILTERED_READS]
        if whole:
            raise ValueError(
                f"{', '.join(whole)} cannot be read together with reads that have a filter; use two passes"
            )
        if len({read.token_filter for read in reads}) > 1:
            raise ValueError("all reads of a pass must have the same filter; use one pass per filter")


def language_reads(
    hidden: Tensor, rows: Rows, head: Head, reads: Sequence[Read], *, temperature: float, chunk_size: int | None
) -> dict[str, Tensor]:
    """Columns of the reads of a language-model head, each `[tokens]` or `[tokens, k]`; 0 at the first token of a row.

    Args:
        hidden: `[tokens, hidden]`, after the model's last norm.
        rows: Rows of the pass, with the columns that the reads take.
        head: The whole head.
        reads: Reads of the head; each adds its columns to the result.
        temperature: Divides the logits.
        chunk_size: Number of positions whose logits exist at one time; None for `chunk_size_of`.

    Raises:
        ValueError: For ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    follows = rows.followers
    found = position_reads(
        hidden[follows - 1], head, rows, follows, reads, temperature=temperature, chunk_size=chunk_size
    )
    return {name: _at(column, follows, len(hidden)) for name, column in found.items()}


def position_reads(
    hidden: Tensor,
    head: Head,
    rows: Rows,
    places: Tensor,
    reads: Sequence[Read],
    *,
    temperature: float,
    chunk_size: int | None,
    shard: VocabShard | None = None,
    sums_hidden_grad: bool = True,
) -> dict[str, Tensor]:
    """Columns of the reads of a language-model head at some tokens, each `[n]` or `[n, k]`; collective over the group
    of a shard.

    Args:
        hidden: `[n, hidden]`, that the tokens follow on.
        head: This rank's rows of it if there is a `shard`.
        rows: Rows of the pass, with the columns that the reads take.
        places: Int64 `[n]`, indices of the tokens.
        reads: Reads of the head; each adds its columns to the result.
        temperature: Divides the logits.
        chunk_size: Number of positions whose logits exist at one time; None for `chunk_size_of`.
        shard: Place of this rank's rows in the head; None if it has the whole head.
        sums_hidden_grad: As in `vocab_parallel_reads`.

    Raises:
        ValueError: For ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    targets = rows[TOKENS][places]
    columns: dict[str, Tensor] = {}
    for read in reads:
        if read.name == "hidden":
            wide = hidden.to(wide_dtype(hidden.dtype))
            columns["hidden"] = pad(wide, (0, max(0, read.width - wide.shape[1])))
        if read.name == "divergences":
            columns["divergences"] = _divergences(
                hidden,
                head,
                targets,
                (rows[read.column][places], rows[read.choice][places]),
                read,
                temperature=temperature,
                chunk_size=chunk_size,
                shard=shard,
                sums_hidden_grad=sums_hidden_grad,
            )
    of_head = [read for read in reads if read.name not in columns]
    if of_head:
        vocab_size = len(head.weight) if shard is None else shard.vocab_size
        options = read_options(rows, places, of_head, vocab_size=vocab_size)
        if shard is None:
            found = head_reads(hidden, head, targets, **options, temperature=temperature, chunk_size=chunk_size)
        else:
            found = vocab_parallel_reads(
                hidden,
                head,
                targets,
                shard,
                **options,
                temperature=temperature,
                chunk_size=chunk_size,
                sums_hidden_grad=sums_hidden_grad,
            )
        columns |= columns_of(found, of_head)
    return columns


def _divergences(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    others: tuple[Tensor, Tensor],
    read: Read,
    *,
    temperature: float,
    chunk_size: int | None,
    shard: VocabShard | None,
    sums_hidden_grad: bool,
) -> Tensor:
    """`[n, 6]`, for the tokens of one other model after those of another; collective over the group of a shard, whose
    ranks have the same tokens.

    Args:
        hidden: `[n, hidden]`, that the tokens follow on.
        head: This rank's rows of it if there is a `shard`.
        targets: Int64 `[n]`, the tokens.
        others: Hidden states `[n, width]` of the other models, and the number of each token's, int `[n]`.
        read: Read with the heads of the other models, the ids to compare and the mixture's weight.
        temperature: Divides the logits of both models.
        chunk_size: Number of positions whose logits exist at one time; None for `chunk_size_of`.
        shard: Place of this rank's rows in the head; None if it has the whole head.
        sums_hidden_grad: As in `vocab_parallel_reads`.
    """
    states, numbers = others
    found, rows = [], []
    # without tokens the first is there for the gradients, which are 0
    for number in numbers.unique().tolist() or [0]:
        own = (numbers == number).nonzero()[:, 0]
        # if one model has all tokens, they are not copied
        its_hidden, its_states, its_targets = (
            values if len(own) == len(numbers) else values[own] for values in (hidden, states, targets)
        )
        other = _other_head(read.heads[number], head, shard)
        rows.append(own)
        found.append(
            divergences(
                its_hidden,
                head,
                its_targets,
                Other(its_states[:, : other.weight.shape[1]], other),
                below=read.below,
                beta=read.beta,
                temperature=temperature,
                chunk_size=chunk_size,
                shard=shard,
                sums_hidden_grad=sums_hidden_grad,
            )
        )
    return found[0] if len(found) == 1 else torch.cat(found)[torch.cat(rows).argsort()]


def _other_head(files: HeadFiles, head: Head, shard: VocabShard | None) -> Head:
    """The rows of another model's head for the ids that this rank has; the last rank has those beyond as well."""
    start, stop = 0, None
    if shard is not None:
        num_rows = len(shard.trim(head.weight))
        start, stop = shard.start, shard.start + num_rows
        stop = None if num_rows and stop == shard.vocab_size else stop
    found = read_head(files, start, stop)
    device = head.weight.device
    return Head(found.weight.to(device), None if found.bias is None else found.bias.to(device), found.transform)


class ReadOptions(TypedDict):
    """Reads of a pass over a head in addition to logprobs, as arguments of `head_reads` and `vocab_parallel_reads`."""

    entropy: bool
    collision: bool
    token_filter: TokenFilter | None
    k: int
    below: int
    ids: Tensor | None


def read_options(rows: Rows, places: Tensor, reads: Sequence[Read], *, vocab_size: int) -> ReadOptions:
    """Results that reads ask for at some tokens.

    Args:
        rows: Rows of the pass, with the columns that the reads take.
        places: Int64 `[n]`, indices of the tokens.
        reads: Reads of a language-model head, except for `hidden` and `divergences`.
        vocab_size: Number of tokens of the whole head, which ids must be below.

    Raises:
        ValueError: For ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    ids = None
    for name in read_columns([read for read in reads if read.name == "logprobs_at"]):
        _check_ids(name, rows.host_column(name), vocab_size)
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


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.ndim != 2 or ids.shape[1] == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"column {name!r} must hold ids as integers [tokens, k]; got {ids.dtype} {list(ids.shape)}")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < -1 or highest >= vocab_size:
        raise ValueError(
            f"column {name!r} has ids from {lowest} to {highest}; the model has the ids 0 to {vocab_size - 1}, "
            "and -1 stands for none"
        )


def value_reads(values: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Column `values` `[tokens]` from the value head's output `[tokens]`: at i that of the state before token i."""
    follows = rows.followers
    return {"values": _at(values.float()[follows - 1], follows, len(values))}


def score_reads(scores: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Column `scores` `[rows]` from the score head's output `[tokens]`: that at the last token of each row."""
    return {"scores": scores.float()[rows.offsets[1:] - 1]}


def _at(values: Tensor, index: Tensor, num: int) -> Tensor:
    """`[num, *inner]`, the values at their indices and 0 elsewhere."""
    return values.new_zeros((num, *values.shape[1:])).index_copy(0, index, values)
