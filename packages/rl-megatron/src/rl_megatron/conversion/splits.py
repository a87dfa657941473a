"""Conversions of one Megatron parameter from and to Hugging Face tensors, spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

from rl_core.resharding import Box

Reader = Callable[[int, tuple[slice, ...]], Tensor]
"""Reads a slice of the i-th Hugging Face tensor."""


class Split(Protocol):
    """Split and join of one parameter; `part` and then `join` over all ranks restores it bit for bit.

    The methods with a body are the defaults of a subclass whose parts are equal chunks along dim 0.
    """

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """Return the part that rank `rank` of `size` holds; reads only the slices that it needs."""

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors from the parts of all ranks."""

    def divides(self, size: int) -> bool:
        """Return whether the parameter can be spread over `size` ranks."""
        return True

    def is_even(self, size: int) -> bool:
        """Return whether each of `size` ranks holds the same share of every Hugging Face tensor as `Chunks` of that
        tensor would give it."""
        return True

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """Return views of a part, one after the other in its memory. Each is an equal chunk along `dim` of a tensor
        that does not depend on the number of ranks."""
        return (part,)

    def in_file_order(self, part: Tensor) -> Tensor:
        """Return the rows of a part in an order in which neighbours are neighbours in a Hugging Face tensor; the part
        itself unless a copy is needed."""
        return part

    @property
    def dim(self) -> int | None:
        """Dim along which the parts are next to each other; None if every rank holds the whole parameter."""
        return 0


@dataclass(frozen=True)
class Whole(Split):
    """Every rank holds the whole parameter."""

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """See `Split.part`."""
        return read(0, ())

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `Split.join`."""
        return (parts[0],)

    def is_even(self, size: int) -> bool:
        """See `Split.is_even`."""
        return size == 1

    @property
    def dim(self) -> int | None:
        """See `Split.dim`."""
        return None


@dataclass(frozen=True)
class Chunks(Split):
    """Equal chunks along a dim.

    Args:
        length: Length of that dim.
        dim: 0 for column-parallel matrices, whose outputs are spread, 1 for row-parallel ones.
    """

    length: int
    dim: int = 0

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """See `Split.part`."""
        chunk = slice(rank * self.length // size, (rank + 1) * self.length // size)
        return read(0, (slice(None),) * self.dim + (chunk,))

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `Split.join`."""
        return (torch.cat(list(parts), self.dim),)

    def divides(self, size: int) -> bool:
        """See `Split.divides`."""
        return self.length % size == 0


@dataclass(frozen=True)
class Vocabulary(Split):
    """Rows of an embedding or a head, padded with zeros at the end so that all ranks hold the same number."""

    num_rows: int

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """See `Split.part`."""
        count = padded_vocab(self.num_rows, size) // size
        start = min(rank * count, self.num_rows)
        rows = read(0, (slice(start, min(start + count, self.num_rows)),))
        return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))])

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `Split.join`."""
        return (torch.cat(list(parts))[: self.num_rows],)


@dataclass(frozen=True)
class Blocks(Split):
    """Blocks of rows; every rank holds an equal chunk of each block, in order.

    Args:
        heights: Rows of each block, for every tensor that the parameter is made of.
    """

    heights: tuple[tuple[int, ...], ...]

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """See `Split.part`."""
        chunks = []
        for index, heights in enumerate(self.heights):
            for end, height in zip(accumulate(heights), heights, strict=True):
                start = end - height
                chunks.append(read(index, (slice(start + rank * height // size, start + (rank + 1) * height // size),)))
        return torch.cat(chunks)

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `Split.join`."""
        blocks = (torch.cat(chunks) for chunks in zip(*map(self.slices, parts), strict=True))
        return tuple(torch.cat(list(islice(blocks, len(heights)))) for heights in self.heights)

    def divides(self, size: int) -> bool:
        """See `Split.divides`."""
        return all(height % size == 0 for height in chain(*self.heights))

    def is_even(self, size: int) -> bool:
        """See `Split.is_even`."""
        return size == 1 or all(len(heights) == 1 for heights in self.heights)

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """See `Split.slices`."""
        size = sum(chain(*self.heights)) // len(part)
        return part.split([height // size for height in chain(*self.heights)])


def gate_up(width: int) -> Blocks:
    """Return the split of a gate's and an up projection's rows. Each rank holds one chunk of both, one below the other.

    Args:
        width: Rows of each.
    """
    return Blocks(((width,), (width,)))


@dataclass(frozen=True)
class Alternating(Split):
    """Rows of a gate and of an up projection that alternate in one tensor. Each rank holds one chunk of both, one below
    the other.

    Args:
        width: Rows of each.
    """

    width: int

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """See `Split.part`."""
        count = 2 * self.width // size
        rows = read(0, (slice(rank * count, (rank + 1) * count),))
        return torch.cat([rows[::2], rows[1::2]])

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `Split.join`."""
        return (torch.cat([self.in_file_order(part) for part in parts]),)

    def divides(self, size: int) -> bool:
        """See `Split.divides`."""
        return self.width % size == 0

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """See `Split.slices`."""
        return part.chunk(2)

    def in_file_order(self, part: Tensor) -> Tensor:
        """See `Split.in_file_order`."""
        return torch.stack(part.chunk(2), 1).flatten(0, 1)


@dataclass(frozen=True)
class QueryKeyValue(Split):
    """Queries, keys and values by group: the queries that share a key, then that key, then its value.

    If there are more ranks than groups, several ranks hold equal runs of each group's rows, whichever of them are
    queries, and Megatron gathers the outputs.

    Args:
        num_heads: Number of heads of queries.
        num_groups: Number of groups of keys and values.
        head_dim: Rows of each.
        has_gates: True if each query is followed by a gate of its head's output. In the parameter, the gates of a
            group follow its queries.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    has_gates: bool = False

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """See `Split.part`."""
        if size > self.num_groups:
            return self._part_of_group(read, rank, size // self.num_groups)
        count = self.num_groups // size
        parts = []
        for index, rows in enumerate(self._rows):
            taken = read(index, (slice(rank * count * rows, (rank + 1) * count * rows),)).unflatten(0, (count, rows))
            if index == 0 and self.has_gates:
                taken = taken.unflatten(1, (-1, 2, self.head_dim)).transpose(1, 2).flatten(1, 3)
            parts.append(taken)
        return torch.cat(parts, 1).flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `Split.join`."""
        grouped = torch.cat(list(parts)).unflatten(0, (self.num_groups, sum(self._rows)))
        queries, keys, values = grouped.split(self._rows, 1)
        if self.has_gates:
            queries = queries.unflatten(1, (2, -1, self.head_dim)).transpose(1, 2).flatten(1, 3)
        return tuple(rows.flatten(0, 1).contiguous() for rows in (queries, keys, values))

    def divides(self, size: int) -> bool:
        """See `Split.divides`."""
        if size > self.num_groups:
            return size % self.num_groups == 0 and sum(self._rows) % (size // self.num_groups) == 0
        return self.num_groups % size == 0

    def is_even(self, size: int) -> bool:
        """See `Split.is_even`."""
        return size <= self.num_groups

    @property
    def _rows(self) -> list[int]:
        """Rows of queries (with their gates), of the key and of the value in one group."""
        queries = self.num_heads // self.num_groups * (2 if self.has_gates else 1)
        return [queries * self.head_dim, self.head_dim, self.head_dim]

    def _part_of_group(self, read: Reader, rank: int, ranks_of_group: int) -> Tensor:
        """Return the part of one of the ranks that share a group."""
        group, place = divmod(rank, ranks_of_group)
        height = sum(self._rows) // ranks_of_group
        parts = []
        for index, (end, rows) in enumerate(zip(accumulate(self._rows), self._rows, strict=True)):
            first, last = (min(max(edge - (end - rows), 0), rows) for edge in (place * height, (place + 1) * height))
            if first == last:
                continue
            base = group * rows
            if index == 0 and self.has_gates:
                # Queries and gates alternate head by head in the file.
                block = read(index, (slice(base, base + rows),)).unflatten(0, (-1, 2, self.head_dim))
                parts.append(block.transpose(0, 1).flatten(0, 2)[first:last])
            else:
                parts.append(read(index, (slice(base + first, base + last),)))
        return torch.cat(parts)


def held_boxes(
    split: Split, shapes: Sequence[Sequence[int]], rank: int, size: int, *, in_memory: bool = False
) -> Iterator[tuple[slice, int, Box]]:
    """Yield the runs of rows of a rank's part that are rows of a Hugging Face tensor: the rows of the part, the number
    of the tensor, and the place in it. Rows are numbered in `Split.in_file_order`. Rows of padding are left out.

    They follow from `part` itself, called with the numbers of rows in place of their values.

    Args:
        split: Split of the parameter.
        shapes: Shapes of the Hugging Face tensors.
        rank: Rank among those that the parameter is spread over.
        size: Number of these ranks.
        in_memory: True if rows are numbered as the rank holds them instead.
    """
    columns: tuple[slice, ...] = ()

    def read(index: int, slices: tuple[slice, ...]) -> Tensor:
        nonlocal columns
        columns = slices[1:]
        rows = torch.arange(1, shapes[index][0] + 1, device="cpu")[slices[0] if slices else slice(None)]
        return (rows + index * _NEXT).view(-1, *(1 for _ in shapes[index][1:]))

    numbers = split.part(read, rank, size)
    numbers = (numbers if in_memory else split.in_file_order(numbers)).flatten()
    starts = [0, *(numbers.diff() != 1).nonzero().flatten().add(1).tolist(), len(numbers)]
    for start, stop in pairwise(starts):
        index, row = divmod(int(numbers[start]) - 1, _NEXT)
        if index < 0:
            continue
        rest = shapes[index][1:]
        cuts = (*columns, *(slice(None),) * (len(rest) - len(columns)))
        spans = [cut.indices(extent)[:2] for cut, extent in zip(cuts, rest, strict=True)]
        yield slice(start, stop), index, ((row, row + stop - start), *spans)


_NEXT = 2**40
"""Distance between the numbers of the rows of two tensors."""


def padded_vocab(vocab_size: int, size: int) -> int:
    """Return the vocabulary size that `size` ranks can share evenly."""
    return -(-vocab_size // size) * size
