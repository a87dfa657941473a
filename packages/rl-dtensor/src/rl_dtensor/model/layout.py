"""The tokens of some rows in one rank's forward pass: packed or padded, and split over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.loss import Rows
from rl_core.torch.rows import packed, padded
from rl_core.torch.training.zigzag import zigzag_order, zigzag_slices, zigzag_tokens


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
        """Start and end of this rank's chunks of a sequence."""
        return zigzag_slices(length, self.size, self.rank)

    def places(self, length: int) -> Tensor:
        """int64 `[length]` on the host, the place in the sequence of each token in the order of ranks."""
        return zigzag_order(length, self.size)


@dataclass(frozen=True)
class Alignment:
    """Constraints that the layout of a forward pass must meet.

    Args:
        multiple: The length of the sequence is a multiple of this.
        context: None if this rank holds whole rows.
    """

    multiple: int = 1
    context: Context | None = None


@dataclass(frozen=True)
class Segment:
    """Consecutive queries, and the keys of their row up to the last of them.

    Args:
        query: Start and end among this rank's tokens.
        key: Start and end in the whole sequence.
    """

    query: tuple[int, int]
    key: tuple[int, int]


class Segments:
    """Segments whose queries follow one another, and their bounds on the device.

    Everything but `seen_keys` and `chunked` is computed when it is built, once per microbatch for all layers.

    Attributes:
        lengths: Queries and keys of each segment.
        longest: Maximum number of queries, and of keys, in a segment.
        query_ends: Int32 `[segments + 1]`, where queries start and end.
        key_ends: Int32 `[segments + 1]`, where keys start and end, those of all segments one after another.
        keys: Int64 indices of those keys in the sequence; None if they are the sequence.
    """

    def __init__(self, items: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self._items = tuple(items)
        self._chunked: dict[int, Segments] = {}
        queries = [item.query[1] - item.query[0] for item in items]
        keys = [item.key[1] - item.key[0] for item in items]
        self.lengths = queries, keys
        self.longest = max(queries), max(keys)
        self.query_ends = torch.tensor([0, *accumulate(queries)], dtype=torch.int32).to(device)
        self.key_ends = torch.tensor([0, *accumulate(keys)], dtype=torch.int32).to(device)
        self.keys: Tensor | None = None
        if any(item.query != item.key for item in items):
            self.keys = torch.cat([torch.arange(*item.key) for item in items]).to(device)

    @cached_property
    def seen_keys(self) -> tuple[Tensor, Tensor]:
        """int64 `[queries]` each: the first and the last key in the sequence that a query may see."""
        queries = torch.tensor(self.lengths[0])
        first = torch.tensor([item.key[0] for item in self._items]).repeat_interleave(queries)
        ahead = torch.tensor([item.key[1] - item.query[1] for item in self._items]).repeat_interleave(queries)
        return first.to(self.device), (torch.arange(len(ahead)) + ahead).to(self.device)

    def chunked(self, size: int) -> Segments:
        """The same queries, which see no key before their chunk: `size` consecutive tokens of their row."""
        if size not in self._chunked:
            parts = [part for item in self._items for part in _in_chunks(item, size)]
            self._chunked[size] = Segments(parts, self.device)
        return self._chunked[size]


def _in_chunks(item: Segment, size: int) -> Iterator[Segment]:
    """A segment cut where chunks of its row end."""
    row, last = item.key
    ahead = last - item.query[1]
    start = item.query[0] + ahead
    while start < last:
        first = start - (start - row) % size
        end = min(first + size, last)
        yield Segment((start - ahead, end - ahead), (first, end))
        start = end


class Layout:
    """One forward pass: some rows, and which of their tokens this rank has.

    It is not a dataclass on purpose: FSDP rebuilds every dataclass among the arguments of each layer in order to cast
    its tensors, so that all this would be computed again by every layer, twice under checkpointing.

    Args:
        rows: The rows, whole.
        input_ids: Int64 `[batch, seq]`, of this rank.
        position_ids: Int64, of the same shape; they start at 0 in every row.
        places: Int64 `[batch * seq]`, the index among the rows' tokens of each position; -1 for padding.
        attention_mask: Int64 `[batch, seq]`, 1 on tokens; None if packed.
        bounds: Start and end of each row in the whole sequence; the whole sequence if padded, as the end of a row
            cannot be seen from within it.
        length: Length of the whole sequence.
        context: The ranks that share the tokens of each row; None if this rank holds whole rows.

    Attributes:
        segments: What this rank's queries attend to; with the `ulysses` method, its heads of the queries of all ranks.
        rank_places: Int64 `[length]`, the place in the sequence of each token in the order of context-parallel ranks.
        key_places: Int64 `[length]`, the place in the order of context-parallel ranks of each token of the sequence.
    """

    def __init__(
        self,
        rows: Rows,
        input_ids: Tensor,
        position_ids: Tensor,
        places: Tensor,
        attention_mask: Tensor | None,
        *,
        bounds: Sequence[tuple[int, int]],
        length: int,
        context: Context | None,
    ) -> None:
        self.rows = rows
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.places = places
        self.attention_mask = attention_mask
        self.bounds = bounds
        self.context = context
        device = input_ids.device
        chunks: Sequence[tuple[int, int]] = ((0, length),)
        if context is not None and context.method == "all_gather":
            chunks = context.chunks(length)
        self.segments = Segments(_segments(chunks, bounds), device)
        if context is not None:
            places_of_ranks = context.places(length)
            self.rank_places, self.key_places = places_of_ranks.to(device), places_of_ranks.argsort().to(device)

    @property
    def shape(self) -> tuple[int, int]:
        """Batch and sequence of this rank."""
        batch, seq = self.input_ids.shape
        return batch, seq


def _segments(chunks: Sequence[tuple[int, int]], bounds: Sequence[tuple[int, int]]) -> list[Segment]:
    """Those of the queries in these chunks of the sequence, chunk by chunk."""
    found, own = [], 0
    for start, end in chunks:
        for first, last in bounds:
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                found.append(Segment((own + begin - start, own + stop - start), (first, stop)))
        own += end - start
    return found


def lay_out(rows: Rows, alignment: Alignment, *, is_packed: bool) -> Layout:
    """The layout of rows for this rank."""
    whole = _packed(rows, alignment.multiple) if is_packed else _padded(rows, alignment.multiple)
    input_ids, position_ids, places, bounds = whole
    mask = None if is_packed else (places >= 0).long()
    length = input_ids.shape[1]
    if alignment.context is not None:
        own = zigzag_tokens(length, alignment.context.size, alignment.context.rank).to(places.device)
        input_ids, position_ids, places = (part[:, own] for part in (input_ids, position_ids, places))
        mask = None if mask is None else mask[:, own]
    return Layout(
        rows,
        input_ids,
        position_ids,
        places.flatten(),
        mask,
        bounds=bounds,
        length=length,
        context=alignment.context,
    )


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
