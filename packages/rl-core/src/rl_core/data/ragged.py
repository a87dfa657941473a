"""Rows of different lengths without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike


def row_index(rows: ArrayLike) -> np.ndarray:
    """Return int64 `[selected]`, row numbers as `select` takes them.

    Raises:
        TypeError: For a mask or other numbers.
    """
    index = np.asarray(rows)
    if index.size and index.dtype.kind not in "iu":
        raise TypeError(
            f"row indices must be integers, got {index.dtype} values (np.flatnonzero turns a mask into indices)"
        )
    return index.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Variable-length rows stored end to end: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    Args:
        values: `[total, *inner]`, the rows one after another.
        offsets: Int64 `[rows + 1]`, non-decreasing, from 0 to `total`.

    Raises:
        ValueError: If the offsets do not describe the values.
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets, dtype=np.int64)
        object.__setattr__(self, "offsets", offsets)
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
            raise ValueError(f"offsets must be one-dimensional and start at 0, got {offsets!r}")
        if offsets[-1] != len(self.values) or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"offsets must increase from 0 to {len(self.values)} (the number of values), got {offsets!r}"
            )

    @classmethod
    def from_rows(
        cls, rows: Iterable[ArrayLike], dtype: DTypeLike | None = None, inner: tuple[int, ...] = ()
    ) -> Ragged:
        """Join rows; `dtype` and `inner` give the type and inner shape if there are no rows to take them from.

        Raises:
            ValueError: Naming row and place, if values are of several kinds: numpy would make texts of all of them.
        """
        arrays = [
            np.asarray(row, dtype=dtype) if dtype is not None else _of_one_kind(row, i) for i, row in enumerate(rows)
        ]
        arrays = [array.reshape(-1, *inner) for array in arrays] if inner else arrays
        if dtype is None and arrays:
            # An empty list has floats for numpy, and would make floats of the tokens around it.
            filled = [array for array in arrays if array.size] or arrays
            kinds = [_kind(array.dtype) for array in filled]
            if len(set(kinds)) > 1:
                numbers = [number for number, array in enumerate(arrays) if array.size]
                other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
                raise ValueError(
                    f"row {numbers[0]} holds {kinds[0]} and row {numbers[other]} {kinds[other]}; all rows must "
                    "have the same kind"
                )
            dtype = np.result_type(*filled)
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        values = np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros((0, *inner), dtype=dtype)
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a Ragged with {len(self)} rows")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[rows]`, the length of each row."""
        return np.diff(self.offsets)

    def select(self, rows: ArrayLike) -> Ragged:
        """Return the given rows, in the given order."""
        index = row_index(rows)
        lengths = self.lengths[index]
        offsets = np.zeros(len(index) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[:-1][index], lengths) + within], offsets)

    def sums(self) -> np.ndarray:
        """Return float64 `[rows, *inner]`, the sum of each row; an empty row sums to 0."""
        # Each row is summed by itself: differences of one running sum would round with the batch, and a NaN would spoil
        # every later row.
        totals = np.zeros((len(self), *self.values.shape[1:]), dtype=np.float64)
        filled = self.lengths > 0
        if filled.any():
            totals[filled] = np.add.reduceat(self.values, self.offsets[:-1][filled], axis=0, dtype=np.float64)
        return totals

    def joined(self, counts: ArrayLike) -> Ragged:
        """Return the same values with rows joined: the first `counts[0]` rows are one, the next `counts[1]` another.

        Args:
            counts: `[joined rows]`, which add up to all rows.
        """
        ends = np.cumsum(np.asarray(counts, dtype=np.int64))
        return Ragged(self.values, self.offsets[np.concatenate([[0], ends])])

    def like(self, values: np.ndarray) -> Ragged:
        """Return other values on the same rows."""
        return Ragged(values, self.offsets)

    def equals(self, other: Ragged) -> bool:
        """Return whether rows, values and dtype agree exactly."""
        return (
            self.values.dtype == other.values.dtype
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.values, other.values)
        )

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts, in order; there must be at least one part."""
        starts = np.cumsum([0] + [len(part.values) for part in parts])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        values = np.concatenate([part.values for part in parts])
        return Ragged(values, np.concatenate([np.zeros(1, dtype=np.int64), *offsets]))


def _of_one_kind(row: ArrayLike, number: int) -> np.ndarray:
    """Return the row as an array, refused if numpy would turn some of its values into another kind."""
    array = np.asarray(row)
    if isinstance(row, np.ndarray) or _kind(array.dtype) == "numbers":
        return array
    kinds = [_kind(np.asarray(value).dtype) for value in row] if isinstance(row, Sequence) else []
    if array.dtype.kind == "O" or len(set(kinds)) > 1:
        place = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
        found = kinds[place] if kinds else "objects"
        raise ValueError(
            f"row {number} holds {found} at {place}; the values of a Ragged are all numbers or all strings"
        )
    return array


def _kind(dtype: np.dtype) -> str:
    return "numbers" if dtype.kind in "biuf" else {"U": "texts", "S": "bytes"}.get(dtype.kind, "objects")
