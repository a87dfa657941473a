"""Named columns over the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from rl_core.ragged import Ragged, row_index

Local = Ragged | np.ndarray
"""A column whose values are in this process."""

TOKENS = "tokens"
"""The column every token-aligned column shares its row lengths with."""


@runtime_checkable
class Handle(Protocol):
    """A column that lies elsewhere (a rollout worker, an object store)."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def fetch(self) -> Local:
        """Bring the values into this process."""
        ...


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """Rows picked from handles, in order; selecting and joining move no data.

    Args:
        handles: where the values lie.
        part: int64 `[rows]`, index into `handles` of each row.
        row: int64 `[rows]`, row within that handle.
    """

    handles: tuple[Handle, ...]
    part: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, handle: Handle) -> RemoteColumn:
        """All rows of one handle."""
        return cls((handle,), np.zeros(len(handle), dtype=np.int64), np.arange(len(handle)))

    def __len__(self) -> int:
        return len(self.row)

    def select(self, rows: ArrayLike) -> RemoteColumn:
        """The given rows, in the given order."""
        index = row_index(rows)
        used, part = np.unique(self.part[index], return_inverse=True)
        # without rows one handle stays, which knows what a row is like
        return RemoteColumn(tuple(self.handles[i] for i in used) or self.handles[:1], part, self.row[index])

    def fetch(self) -> Local:
        """The rows' values, each handle fetched once."""
        parts = [handle.fetch() for handle in self.handles]
        starts = np.cumsum([0] + [len(part) for part in parts])[:-1]
        return _select(_concat(parts), starts[self.part] + self.row)

    @staticmethod
    def concat(columns: Sequence[RemoteColumn]) -> RemoteColumn:
        """Rows of all columns, in order."""
        handles = {id(handle): handle for column in columns for handle in column.handles}
        place = {key: index for index, key in enumerate(handles)}
        places = [np.array([place[id(handle)] for handle in column.handles], dtype=np.int64) for column in columns]
        return RemoteColumn(
            tuple(handles.values()),
            np.concatenate([own[column.part] for own, column in zip(places, columns, strict=True)]),
            np.concatenate([column.row for column in columns]),
        )


Column = Ragged | np.ndarray | RemoteColumn


class Batch:
    """Columns over the same rows, each a `Ragged`, an array or a handle to one that lies elsewhere.

    Token-aligned columns share their row lengths with `tokens`. Rows that carry the same `pair` id belong together
    and stay in one microbatch. A batch is never changed: every method returns another.

    Args:
        columns: name to column; all must have the same number of rows, and at least one is needed.

    Raises:
        ValueError: naming the columns whose number of rows differs.
    """

    def __init__(self, columns: Mapping[str, Column | Handle]) -> None:
        if not columns:
            raise ValueError("a Batch needs at least one column")
        kept = {name: _as_column(column) for name, column in columns.items()}
        rows = {name: len(column) for name, column in kept.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"columns of a Batch must have the same number of rows, got {rows}")
        self._columns: dict[str, Column] = kept

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self._columns)})"

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns as they lie, without fetching."""
        return dict(self._columns)

    def __getitem__(self, name: str) -> Local:
        """The column's values, fetched where they lie elsewhere."""
        self.require(name)
        column = self._columns[name]
        if isinstance(column, RemoteColumn):
            return column.fetch()
        return column

    def ragged(self, name: str) -> Ragged:
        """The column, which must be a `Ragged`."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is an array, not a Ragged")
        return column

    def array(self, name: str) -> np.ndarray:
        """The column, which must be an array."""
        column = self[name]
        if isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is a Ragged, not an array")
        return column

    def require(self, *names: str) -> None:
        """Raise a `ValueError` that names every column of `names` that is missing."""
        missing = [name for name in names if name not in self._columns]
        if missing:
            raise ValueError(f"batch lacks columns {missing}; it has {sorted(self._columns)}")

    def only(self, names: Sequence[str]) -> Batch:
        """The named columns alone."""
        self.require(*names)
        return Batch({name: self._columns[name] for name in names})

    def with_columns(self, columns: Mapping[str, Column | Handle]) -> Batch:
        """The same rows with columns added or replaced."""
        return Batch({**self._columns, **columns})

    def select(self, rows: ArrayLike) -> Batch:
        """The given rows, in the given order."""
        return Batch({name: _select(column, rows) for name, column in self._columns.items()})

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Consecutive parts of the given numbers of rows, which must add up to all rows."""
        if sum(sizes) != len(self):
            raise ValueError(f"parts of {list(sizes)} rows do not add up to {len(self)} rows")
        ends = np.cumsum(sizes)
        return [self.select(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def local(self) -> Batch:
        """The same batch with every column in this process."""
        return Batch({name: self[name] for name in self._columns})

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all batches, in order; there must be one at least, and all must have the same columns."""
        if not batches:
            raise ValueError("no batches to join: their columns are not known")
        names = set(batches[0])
        for batch in batches:
            if set(batch) != names:
                raise ValueError(f"batches to join must have the same columns, got {sorted(names)} and {sorted(batch)}")
        return Batch({name: _concat([batch.columns[name] for batch in batches]) for name in batches[0]})


def _as_column(column: Column | Handle) -> Column:
    if isinstance(column, Ragged | RemoteColumn | np.ndarray):
        return column
    if isinstance(column, Handle):
        return RemoteColumn.of(column)
    raise TypeError(f"a column is a Ragged, an array or a handle, got {type(column).__name__}")


def _select(column, rows: ArrayLike):  # type: ignore[no-untyped-def]  # same column type in and out
    if isinstance(column, Ragged | RemoteColumn):
        return column.select(rows)
    return column[row_index(rows)]


def _concat(columns):  # type: ignore[no-untyped-def]  # same column type in and out
    if all(isinstance(column, RemoteColumn) for column in columns):
        return RemoteColumn.concat(columns)
    fetched: Any = [column.fetch() if isinstance(column, RemoteColumn) else column for column in columns]
    return Ragged.concat(fetched) if isinstance(fetched[0], Ragged) else np.concatenate(fetched)
