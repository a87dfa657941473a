"""Conversions of one Megatron parameter from and to Hugging Face tensors, spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Reader = Callable[[int, tuple[slice, ...]], Tensor]
"""Reads a slice of the i-th Hugging Face tensor."""


class Split(Protocol):
    """Both directions of one parameter; `part` then `join` over all ranks gives back what was read, bit for bit."""

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """Return the part that rank `rank` of `size` holds; reads only the slices that it needs."""
        ...

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The Hugging Face tensors from the parts of all ranks."""
        ...

    def divides(self, size: int) -> bool:
        """Whether the parameter can be spread over `size` ranks."""
        ...

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """Views of a part, each an equal chunk along `dim` of a tensor that does not depend on the number of ranks."""
        ...

    @property
    def dim(self) -> int | None:
        """Dim along which the parts lie side by side; None if every rank holds all of it."""
        ...


@dataclass(frozen=True)
class Whole:
    """Every rank holds all of it."""

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """As `Split.part`."""
        return read(0, ())

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `Split.join`."""
        return (parts[0],)

    def divides(self, size: int) -> bool:
        """As `Split.divides`."""
        return True

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """As `Split.slices`."""
        return (part,)

    @property
    def dim(self) -> int | None:
        """As `Split.dim`."""
        return None


@dataclass(frozen=True)
class Chunks:
    """Equal chunks along a dim.

    Args:
        length: of that dim.
        dim: 0 for column-parallel matrices, whose outputs are spread, 1 for row-parallel ones.
    """

    length: int
    dim: int = 0

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """As `Split.part`."""
        chunk = slice(rank * self.length // size, (rank + 1) * self.length // size)
        return read(0, (slice(None),) * self.dim + (chunk,))

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `Split.join`."""
        return (torch.cat(list(parts), self.dim),)

    def divides(self, size: int) -> bool:
        """As `Split.divides`."""
        return self.length % size == 0

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """As `Split.slices`."""
        return (part,)


@dataclass(frozen=True)
class Vocabulary:
    """Rows of an embedding or a head, padded with zeros at the end so that all ranks hold as many."""

    num_rows: int

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """As `Split.part`."""
        count = padded_vocab(self.num_rows, size) // size
        start = min(rank * count, self.num_rows)
        rows = read(0, (slice(start, min(start + count, self.num_rows)),))
        return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))])

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `Split.join`."""
        return (torch.cat(list(parts))[: self.num_rows],)

    def divides(self, size: int) -> bool:
        """As `Split.divides`."""
        return True

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """As `Split.slices`."""
        return (part,)

    @property
    def dim(self) -> int | None:
        """As `Split.dim`."""
        return 0


@dataclass(frozen=True)
class GateUp:
    """The gate's and the up projection's rows, one below the other on each rank.

    Args:
        width: rows of each.
    """

    width: int

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """As `Split.part`."""
        chunk = (slice(rank * self.width // size, (rank + 1) * self.width // size),)
        return torch.cat([read(0, chunk), read(1, chunk)])

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `Split.join`."""
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])

    def divides(self, size: int) -> bool:
        """As `Split.divides`."""
        return self.width % size == 0

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """As `Split.slices`."""
        return part.chunk(2)

    @property
    def dim(self) -> int | None:
        """As `Split.dim`."""
        return 0


@dataclass(frozen=True)
class QueryKeyValue:
    """Queries, keys and values by group: the queries that share a key, then that key, then its value.

    Args:
        num_heads: of queries.
        num_groups: of keys and values.
        head_dim: rows of each.
    """

    num_heads: int
    num_groups: int
    head_dim: int

    def part(self, read: Reader, rank: int, size: int) -> Tensor:
        """As `Split.part`."""
        count = self.num_groups // size
        parts = []
        for index, rows in enumerate(self._rows):
            taken = read(index, (slice(rank * count * rows, (rank + 1) * count * rows),))
            parts.append(taken.unflatten(0, (count, rows)))
        return torch.cat(parts, 1).flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As `Split.join`."""
        grouped = torch.cat(list(parts)).unflatten(0, (self.num_groups, sum(self._rows)))
        return tuple(rows.flatten(0, 1).contiguous() for rows in grouped.split(self._rows, 1))

    def divides(self, size: int) -> bool:
        """As `Split.divides`."""
        return self.num_groups % size == 0

    def slices(self, part: Tensor) -> tuple[Tensor, ...]:
        """As `Split.slices`."""
        return (part,)

    @property
    def dim(self) -> int | None:
        """As `Split.dim`."""
        return 0

    @property
    def _rows(self) -> list[int]:
        """Rows of queries, of the key and of the value in one group."""
        return [self.num_heads // self.num_groups * self.head_dim, self.head_dim, self.head_dim]


def padded_vocab(vocab_size: int, size: int) -> int:
    """The vocabulary that `size` ranks can share evenly."""
    return -(-vocab_size // size) * size
