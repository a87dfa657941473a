"""Named columns over the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from rl_core.data.ragged import Ragged, row_index
from rl_core.images import DIGEST_BYTES

Local = Ragged | np.ndarray
"""A column whose values are in this process."""

TOKENS = "tokens"
"""The column every token-aligned column shares its row lengths with."""


class RowStore(Protocol):
    """Columns over the same rows that are stored elsewhere, such as in an object store."""

    def fetch(self) -> Batch:
        """Bring the columns into this process."""


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Rows picked from stores, in order; selecting and joining move no data. Columns over the same rows share one.

    Args:
        stores: That hold the rows.
        part: Int64 `[rows]`, index into `stores` of each row.
        row: Int64 `[rows]`, row within that store.
        lengths: Int64 `[rows]`, tokens of each row, so that rows can be planned without being read.
    """

    stores: tuple[RowStore, ...]
    part: np.ndarray
    row: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, store: RowStore, lengths: ArrayLike) -> RemoteRows:
        """Return all rows of one store."""
        lengths = np.asarray(lengths, dtype=np.int64)
        return cls((store,), np.zeros(len(lengths), dtype=np.int64), np.arange(len(lengths)), lengths)

    @classmethod
    def split_over(cls, stores: Sequence[RowStore], rows: Sequence[np.ndarray], lengths: np.ndarray) -> RemoteRows:
        """Return rows `0, 1, ...`, where store i holds `rows[i]` in that order."""
        sizes = [len(each) for each in rows]
        order = np.argsort(np.concatenate(rows), kind="stable")
        part = np.repeat(np.arange(len(rows)), sizes)[order]
        row = np.concatenate([np.arange(size) for size in sizes])[order]
        # Stores without rows are left out, because nobody may know their columns.
        return cls(tuple(stores), part, row, lengths).select(np.arange(len(lengths)))

    def __len__(self) -> int:
        return len(self.row)

    def columns(self, names: Sequence[str]) -> dict[str, Column]:
        """Return these columns of the stores."""
        return {name: RemoteColumn(self, name) for name in names}

    def select(self, rows: ArrayLike) -> RemoteRows:
        """Return the given rows, in the given order."""
        index = row_index(rows)
        used, part = np.unique(self.part[index], return_inverse=True)
        # Without rows one store stays, which knows the dtype and shape of a row.
        stores = tuple(self.stores[i] for i in used) or self.stores[:1]
        return RemoteRows(stores, part, self.row[index], self.lengths[index])

    def between(self, start: int, end: int) -> RemoteRows:
        """Return consecutive rows, which must belong to a single store."""
        assert len(self.stores) == 1, f"rows of {len(self.stores)} stores are selected one by one"
        return RemoteRows(self.stores, self.part[start:end], self.row[start:end], self.lengths[start:end])

    def fetch_all(self, names: Sequence[str]) -> dict[str, Local]:
        """Return the rows of several columns, each store fetched once."""
        fetched = [store.fetch() for store in self.stores]
        return {name: pick_rows([store[name] for store in fetched], self.part, self.row) for name in names}

    @staticmethod
    def concat(parts: Sequence[RemoteRows]) -> RemoteRows:
        """Return the rows of all parts, in order."""
        stores = {id(store): store for rows in parts for store in rows.stores}
        place = {key: index for index, key in enumerate(stores)}
        places = [np.array([place[id(store)] for store in rows.stores], dtype=np.int64) for rows in parts]
        return RemoteRows(
            tuple(stores.values()),
            np.concatenate([own[rows.part] for own, rows in zip(places, parts, strict=True)]),
            np.concatenate([rows.row for rows in parts]),
            np.concatenate([rows.lengths for rows in parts]),
        )


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """A column that is stored elsewhere.

    Args:
        rows: Rows of the column.
        name: Name of the column in their stores.
        zeroed: Bool `[rows]`, rows whose values count as zeros; None for none.
    """

    rows: RemoteRows
    name: str
    zeroed: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self) -> Local:
        """Return the values, in this process."""
        return zero_rows(self.rows.fetch_all([self.name])[self.name], self.zeroed)


Column = Ragged | np.ndarray | RemoteColumn
"""A column of a batch: one entry per row, as arrays of any length, as one array, or stored elsewhere."""


def pick_rows(parts: Sequence[Local], part: np.ndarray, row: np.ndarray) -> Local:
    """Return the rows of a column that has several parts, at least one.

    Args:
        parts: Parts of the column.
        part: int64 `[rows]`, index of the part that each row is in.
        row: int64 `[rows]`, index of each row within its part.
    """
    first = parts[0]
    if isinstance(first, Ragged):
        picked = [parts[p][r] for p, r in zip(part.tolist(), row.tolist(), strict=True)]
        return Ragged.from_rows(picked, first.values.dtype, first.values.shape[1:])
    starts = np.cumsum([0] + [len(each) for each in parts])[:-1]
    return np.concatenate(parts)[starts[part] + row]  # type: ignore[arg-type]  # all parts are of one kind


def zero_rows(column: Local, zeroed: np.ndarray | None) -> Local:
    """Return the column with zeros in the rows for which `zeroed`, bool `[rows]`, is true; None for none."""
    if zeroed is None or not zeroed.any():
        return column
    if isinstance(column, Ragged):
        values = column.values.copy()
        values[np.repeat(zeroed, column.lengths)] = 0
        return column.like(values)
    values = column.copy()
    values[zeroed] = 0
    return values


class Batch:
    """Columns over the same rows, each a `Ragged`, an array or a `RemoteColumn` that is stored elsewhere.

    Token-aligned columns share their row lengths with `tokens`. Rows that carry the same `pair` id belong together
    and stay in one microbatch. A batch is never changed: every method returns another.

    Args:
        columns: Name to column; all must have the same number of rows, and at least one is needed.

    Raises:
        ValueError: Naming the columns whose number of rows differs.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not columns:
            raise ValueError("a Batch needs at least one column")
        for column in columns.values():
            if not isinstance(column, Ragged | RemoteColumn | np.ndarray):
                raise TypeError(f"a column is a Ragged, an array or a RemoteColumn, got {type(column).__name__}")
        kept = dict(columns)
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
        """The columns as they are, without fetching."""
        return dict(self._columns)

    def __getitem__(self, name: str) -> Local:
        """Return the column's values, fetched if they are stored elsewhere."""
        self.require(name)
        column = self._columns[name]
        return column.fetch() if isinstance(column, RemoteColumn) else column

    def ragged(self, name: str) -> Ragged:
        """Return the column, which must be a `Ragged`."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is an array, not a Ragged")
        return column

    def array(self, name: str) -> np.ndarray:
        """Return the column, which must be an array."""
        column = self[name]
        if isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is a Ragged, not an array")
        return column

    def require(self, *names: str) -> None:
        """Raise a `ValueError` that lists every missing column of `names`."""
        missing = [name for name in names if name not in self._columns]
        if missing:
            raise ValueError(f"batch lacks columns {missing}; it has {sorted(self._columns)}")

    def only(self, names: Sequence[str]) -> Batch:
        """Return the batch with only the named columns."""
        self.require(*names)
        return Batch({name: self._columns[name] for name in names})

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        """Return the same rows with columns added or replaced."""
        return Batch({**self._columns, **columns})

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[rows]`, the length of each row of `tokens`, known without fetching them."""
        self.require(TOKENS)
        column = self._columns[TOKENS]
        return column.rows.lengths if isinstance(column, RemoteColumn) else self.ragged(TOKENS).lengths

    def with_zeros(self, name: str, zeroed: np.ndarray) -> Batch:
        """Return the same rows with zeros in this column of those for which `zeroed`, bool `[rows]`, is true."""
        self.require(name)
        column = self._columns[name]
        if isinstance(column, RemoteColumn):
            before = False if column.zeroed is None else column.zeroed
            return self.with_columns({name: replace(column, zeroed=before | zeroed)})
        return self.with_columns({name: zero_rows(column, zeroed)})

    def select(self, rows: ArrayLike) -> Batch:
        """Return the given rows, in the given order."""
        index = row_index(rows)
        # Columns that share their rows before share them after.
        remote = {rows: rows.select(index) for rows in self._remote_names()}
        columns: dict[str, Column] = {}
        for name, column in self._columns.items():
            if isinstance(column, RemoteColumn):
                zeroed = None if column.zeroed is None else column.zeroed[index]
                columns[name] = RemoteColumn(remote[column.rows], column.name, zeroed)
            else:
                columns[name] = column.select(index) if isinstance(column, Ragged) else column[index]
        return Batch(columns)

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Return consecutive parts of the given numbers of rows, which must add up to all rows."""
        if sum(sizes) != len(self):
            raise ValueError(f"parts of {list(sizes)} rows do not add up to {len(self)} rows")
        ends = np.cumsum(sizes)
        return [self.select(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def local(self) -> Batch:
        """Return the same batch with every column in this process; columns of the same rows are fetched together."""
        fetched = {rows: rows.fetch_all(sorted(names)) for rows, names in self._remote_names().items()}
        columns = dict(self._columns)
        for name, column in columns.items():
            if isinstance(column, RemoteColumn):
                columns[name] = zero_rows(fetched[column.rows][column.name], column.zeroed)
        return Batch(columns)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return the rows of all batches, in order; there must be at least one, and all must have the same columns."""
        if not batches:
            raise ValueError("no batches to join: their columns are not known")
        names = set(batches[0])
        for batch in batches:
            if set(batch) != names:
                raise ValueError(f"batches to join must have the same columns, got {sorted(names)} and {sorted(batch)}")
        joined: dict[tuple[RemoteRows, ...], RemoteRows] = {}
        found: dict[str, Column] = {}
        for name in batches[0]:
            columns = [batch._columns[name] for batch in batches]
            remote = [column for column in columns if isinstance(column, RemoteColumn)]
            if len(remote) < len(columns) or len({column.name for column in remote}) > 1:
                fetched: Any = [column.fetch() if isinstance(column, RemoteColumn) else column for column in columns]
                found[name] = Ragged.concat(fetched) if isinstance(fetched[0], Ragged) else np.concatenate(fetched)
                continue
            key = tuple(column.rows for column in remote)
            if key not in joined:
                joined[key] = RemoteRows.concat(key)
            zeroed = None
            if any(column.zeroed is not None for column in remote):
                zeroed = np.concatenate(
                    [np.zeros(len(each), dtype=bool) if each.zeroed is None else each.zeroed for each in remote]
                )
            found[name] = RemoteColumn(joined[key], remote[0].name, zeroed)
        return Batch(found)

    def _remote_names(self) -> dict[RemoteRows, set[str]]:
        """Return the rows that are stored elsewhere, with their columns by name in the stores."""
        names: dict[RemoteRows, set[str]] = {}
        for column in self._columns.values():
            if isinstance(column, RemoteColumn):
                names.setdefault(column.rows, set()).add(column.name)
        return names


def image_column(images: Sequence[Sequence[str]]) -> Ragged:
    """Return the column `rl_core.images.IMAGES` of rows.

    Args:
        images: Digests of each row's images, in the order of their tokens.
    """
    rows = [np.frombuffer(bytes.fromhex("".join(digests)), dtype=np.uint8) for digests in images]
    return Ragged.from_rows(rows, np.uint8, (DIGEST_BYTES,))
