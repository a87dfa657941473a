"""Sequences and mappings of rows that are made when they are asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
U = TypeVar("U")


class Lazily(Sequence[T], Generic[T]):
    """A sequence that holds no item: `make(index)` makes it."""

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(each) for each in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._make(int(index) % self._size)

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(self._size))


class RowMapping(Mapping[str, T], Generic[T]):
    """Values by the ids of rows, `name:split:row`, in the order of the rows.

    Args:
        prefix: Prefix of the ids, `name:split`.
        numbers: Numbers of the rows, ascending.
        values: Values of each row; a list, or a sequence that makes them.
    """

    def __init__(self, prefix: str, numbers: Sequence[int] | np.ndarray, values: Sequence[T]) -> None:
        self._prefix = prefix
        self._numbers = numbers
        self.values_in_order = values

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return (f"{self._prefix}:{number}" for number in self._numbers)

    def __getitem__(self, row_id: str) -> T:
        prefix, _, number = row_id.rpartition(":")
        if prefix != self._prefix or not number.isdigit():
            raise KeyError(row_id)
        position = bisect_left(self._numbers, int(number))
        if position == len(self._numbers) or self._numbers[position] != int(number):
            raise KeyError(row_id)
        return self.values_in_order[position]

    def row_id(self, position: int) -> str:
        """Return the id of a row by its position among the existing rows."""
        return f"{self._prefix}:{self._numbers[position]}"

    def with_values(self, values: Sequence[U]) -> RowMapping[U]:
        """Return other values of the same rows."""
        return RowMapping(self._prefix, self._numbers, values)

    def select(self, positions: np.ndarray) -> RowMapping[T]:
        """Return the rows at these positions, ascending."""
        values = self.values_in_order
        numbers = np.asarray(self._numbers)[positions]
        if isinstance(values, list):
            return RowMapping(self._prefix, numbers, [values[position] for position in positions])
        return RowMapping(self._prefix, numbers, Lazily(len(positions), lambda index: values[int(positions[index])]))

    def flat(self, make: Callable[[str, int, int, Any], U]) -> Sequence[U]:
        """Return results of `make` for each item of values that are lists. Its arguments are the row's id, the item's
        number in it, the number of its items, and the item. The result is a list if the values are one, and otherwise
        made when asked for."""
        values: Sequence[Any] = self.values_in_order
        counts = np.fromiter(map(len, values), dtype=np.int64, count=len(self))
        ends = counts.cumsum()

        def item(index: int) -> U:
            position = int(np.searchsorted(ends, index, side="right"))
            number = int(index - ends[position] + counts[position])
            return make(self.row_id(position), number, int(counts[position]), values[position][number])

        lazily = Lazily(int(counts.sum()), item)
        return list(lazily) if isinstance(values, list) else lazily

    def rows(self, make: Callable[[str, T], U]) -> Sequence[U]:
        """Return results of `make` for each id and value: a list if the values are one, and otherwise made when asked
        for."""
        values = self.values_in_order
        if isinstance(values, list):
            return [make(row_id, value) for row_id, value in zip(self, values, strict=True)]
        return Lazily(len(self), lambda index: make(self.row_id(index), values[index]))
