"""The tokens of some rows in one rank's forward pass: packed or padded, and split over context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.loss import Rows
from rl_core.torch.rows import packed, padded


@dataclass(frozen=True)
class Context:
    """The ranks that share the tokens of each row.

    Each holds two of `2 size` equal chunks of the sequence, the i-th and the i-th from the end, so that under a causal
    mask all have the same work.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    method: str

    def chunks(self, length: int) -> tuple[tuple[int, int], ...]:
        """Where this rank's chunks lie in a sequence."""
        return tuple(_chunk(index, length // (2 * self.size)) for index in (self.rank, 2 * self.size - 1 - self.rank))

    def places(self, length: int, device: torch.device) -> Tensor:
        """int64 `[length]`, the place in the sequence of each token in the order of ranks."""
        width = length // (2 * self.size)
        order = [index for rank in range(self.size) for index in (rank, 2 * self.size - 1 - rank)]
        return torch.cat([torch.arange(*_chunk(index, width), device=device) for index in order])


def _chunk(index: int, width: int) -> tuple[int, int]:
    return index * width, (index + 1) * width


@dataclass(frozen=True)
class Alignment:
    """What a forward pass must fit.

    Args:
        multiple: of the sequence's length.
        context: None where this rank holds whole rows.
    """

    multiple: int = 1
    context: Context | None = None


@dataclass(frozen=True)
class Segment:
    """Consecutive queries, and the keys of their row up to the last of them.

    Args:
        query: start and end among this rank's tokens.
        key: start and end in the whole sequence.
    """

    query: tuple[int, int]
    key: tuple[int, int]


@dataclass(frozen=True)
class Segments:
    """Segments whose queries follow one another, and their bounds on the device, made once for all layers."""

    items: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Queries and keys of each segment."""
        return (
            [item.query[1] - item.query[0] for item in self.items],
            [item.key[1] - item.key[0] for item in self.items],
        )

    @cached_property
    def query_ends(self) -> Tensor:
        """int32 `[segments + 1]`, where queries start and end."""
        return torch.tensor([0, *(item.query[1] for item in self.items)], dtype=torch.int32, device=self.device)

    @cached_property
    def key_ends(self) -> Tensor:
        """int32 `[segments + 1]`, where keys start and end, those of all segments one after another."""
        return torch.tensor([0, *self.lengths[1]], device=self.device).cumsum(0, dtype=torch.int32)

    @cached_property
    def keys(self) -> Tensor | None:
        """int64 indices of those keys in the sequence; None where they are the sequence."""
        if all(item.query == item.key for item in self.items):
            return None
        return torch.cat([torch.arange(*item.key, device=self.device) for item in self.items])

    @cached_property
    def seen_keys(self) -> tuple[Tensor, Tensor]:
        """int64 `[queries]` each: the first and the last key in the sequence that a query may see."""
        first = [item.key[0] for item in self.items for _ in range(*item.query)]
        last = [item.key[1] - item.query[1] + place for item in self.items for place in range(*item.query)]
        return torch.tensor(first, device=self.device), torch.tensor(last, device=self.device)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries and most keys of a segment."""
        queries, keys = self.lengths
        return max(queries), max(keys)


@dataclass(frozen=True)
class Layout:
    """One forward pass.

    Args:
        input_ids: int64 `[batch, seq]`, of this rank.
        position_ids: int64, of the same shape; they start at 0 in every row.
        places: int64 `[batch * seq]`, the index among the rows' tokens of each position; -1 for padding.
        attention_mask: int64 `[batch, seq]`, 1 on tokens; None where packed.
        bounds: start and end of each row in the whole sequence; the whole sequence where padded, where the end of a
            row cannot be seen from within it.
        length: of the whole sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    attention_mask: Tensor | None
    bounds: tuple[tuple[int, int], ...]
    length: int
    context: Context | None

    @property
    def shape(self) -> tuple[int, int]:
        """Batch and sequence of this rank."""
        batch, seq = self.input_ids.shape
        return batch, seq

    @cached_property
    def segments(self) -> Segments:
        """What this rank's queries attend to."""
        chunks = ((0, self.length),) if self.context is None else self.context.chunks(self.length)
        found, own = [], 0
        for start, end in chunks:
            for first, last in self.bounds:
                begin, stop = max(start, first), min(end, last)
                if begin < stop:
                    found.append(Segment((own + begin - start, own + stop - start), (first, stop)))
            own += end - start
        return Segments(tuple(found), self.input_ids.device)

    @cached_property
    def whole_rows(self) -> Segments:
        """What the queries of all context-parallel ranks attend to."""
        return Segments(tuple(Segment(bounds, bounds) for bounds in self.bounds), self.input_ids.device)

    @cached_property
    def rank_places(self) -> Tensor:
        """int64 `[length]`, the place in the sequence of each token in the order of context-parallel ranks."""
        assert self.context is not None
        return self.context.places(self.length, self.input_ids.device)

    @cached_property
    def key_places(self) -> Tensor:
        """int64 `[length]`, the place in the order of context-parallel ranks of each token of the sequence."""
        return self.rank_places.argsort()


def lay_out(rows: Rows, alignment: Alignment, *, is_packed: bool) -> Layout:
    """The layout of rows for this rank."""
    whole = _packed(rows, alignment.multiple) if is_packed else _padded(rows, alignment.multiple)
    input_ids, position_ids, places, bounds = whole
    mask = None if is_packed else (places >= 0).long()
    length = input_ids.shape[1]
    if alignment.context is not None:
        own = torch.cat([torch.arange(*chunk) for chunk in alignment.context.chunks(length)]).to(places.device)
        input_ids, position_ids, places = (part[:, own] for part in (input_ids, position_ids, places))
        mask = None if mask is None else mask[:, own]
    return Layout(input_ids, position_ids, places.flatten(), mask, bounds, length, alignment.context)


Whole = tuple[Tensor, Tensor, Tensor, tuple[tuple[int, int], ...]]


def _packed(rows: Rows, multiple: int) -> Whole:
    """Rows end to end, and one of padding."""
    inputs = packed(rows)
    total = inputs.input_ids.shape[1]
    missing = -total % multiple
    ends = [0]
    for length in [*inputs.row_lengths, *([missing] if missing else [])]:
        ends.append(ends[-1] + length)
    extra = torch.arange(missing, device=rows.offsets.device)[None]
    places = torch.arange(total, device=rows.offsets.device)[None]
    return (
        torch.cat([inputs.input_ids, torch.zeros_like(extra)], 1),
        torch.cat([inputs.position_ids, extra], 1),
        torch.cat([places, torch.full_like(extra, -1)], 1),
        tuple(pairwise(ends)),
    )


def _padded(rows: Rows, multiple: int) -> Whole:
    """One row per sequence, padded on the right."""
    inputs = padded(rows)
    assert inputs.attention_mask is not None
    longest = inputs.input_ids.shape[1]
    missing = -longest % multiple
    position = torch.arange(longest + missing, device=rows.offsets.device).expand(len(rows), -1)
    is_token = torch.nn.functional.pad(inputs.attention_mask, (0, missing)).bool()
    places = (rows.offsets[:-1, None] + position).where(is_token, -1)
    input_ids = torch.nn.functional.pad(inputs.input_ids, (0, missing))
    return input_ids, position, places, ((0, longest + missing),)
