"""Rows of many stores, brought together for every shard of a model: pure functions.

A shard's rows come from about as many groups as it has rows. Were each rank to read all of them, a step would make as
many requests as it has rollouts, for several times the data. So a few ranks, the pickers, each read a part of the
stores once and lay out their rows by shard; a rank then gets one chunk from each picker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rl_core.data.batch import Batch, Column, Local, RemoteColumn, RemoteRows, RowStore, pick_rows, zero_rows
from rl_core.data.ragged import Ragged

Chunk = Sequence[Batch | None]
"""The rows that a picker has for one shard: for each family, in the order of the shard; None if it read no store of
that family."""


class Pick(NamedTuple):
    """Which rows a picker takes of one family, the columns over the same rows.

    Args:
        names: Columns by name in the stores.
        stores: How many of the picker's stores hold the family, in order.
        part, row: int64, a row per shard: the store, among these, and the row there of each of its rows.
    """

    names: tuple[str, ...]
    stores: int
    part: Ragged
    row: Ragged


class ChunkLayout(NamedTuple):
    """Places of the rows of one shard in the chunks that it gets, for one family.

    Args:
        columns: Name in the batch, to name in the stores.
        part, row: int64 `[rows]`, chunk and row there of each.
        zeroed: Bool `[rows]` by column, rows that count as zeros.
    """

    columns: Mapping[str, str]
    part: np.ndarray
    row: np.ndarray
    zeroed: Mapping[str, np.ndarray]


class Shard(NamedTuple):
    """The rows of one data-parallel rank.

    Args:
        local: Columns that came with it.
        layouts: Layouts of the families that did not.
    """

    local: Batch | None
    layouts: tuple[ChunkLayout, ...] = ()

    def assemble(self, chunks: Sequence[Chunk]) -> Batch:
        """Return the whole batch, from the chunk of each picker for this shard."""
        columns: dict[str, Column] = dict(self.local.columns) if self.local is not None else {}
        for family, layout in enumerate(self.layouts):
            found = {picker: rows for picker, chunk in enumerate(chunks) if (rows := chunk[family]) is not None}
            part = np.searchsorted(list(found), layout.part)
            for name, stored in layout.columns.items():
                parts: list[Local] = [rows[stored] for rows in found.values()]
                columns[name] = zero_rows(pick_rows(parts, part, layout.row), layout.zeroed.get(name))
        return Batch(columns)


class Plan(NamedTuple):
    """A shuffle.

    Args:
        picks: Picks of each picker, a `Pick` per family.
        stores: That each picker reads, family after family.
        shards: The parts that make up each shard, in order.
    """

    picks: tuple[tuple[Pick, ...], ...]
    stores: tuple[tuple[RowStore, ...], ...]
    shards: tuple[Shard, ...]


def plan_shuffle(batch: Batch, rows: Sequence[np.ndarray], max_pickers: int) -> Plan:
    """Plan how the rows of each shard are brought together; fetches nothing.

    Args:
        batch: Columns that are local are sent as they are.
        rows: Int64, the rows of each shard.
        max_pickers: Maximum number of pickers; there are fewer if there are fewer stores, and none if every column is
            local.
    """
    families: dict[RemoteRows, dict[str, RemoteColumn]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            families.setdefault(column.rows, {})[name] = column
    near = [name for name, column in batch.columns.items() if not isinstance(column, RemoteColumn)]
    local = batch.only(near) if near else None
    num_pickers = min(max_pickers, max((len(family.stores) for family in families), default=0))
    picked = [_plan_family(family, columns, rows, num_pickers) for family, columns in families.items()]
    pickers = range(num_pickers)
    picks = tuple(tuple(of_family[picker] for of_family, _, _ in picked) for picker in pickers)
    stores = tuple(tuple(store for _, held, _ in picked for store in held[picker]) for picker in pickers)
    shards = tuple(
        Shard(None if local is None else local.select(index), tuple(layouts[shard] for _, _, layouts in picked))
        for shard, index in enumerate(rows)
    )
    return Plan(picks, stores, shards)


def pick(picks: Sequence[Pick], stores: Sequence[Batch]) -> list[Chunk]:
    """Return the rows that a picker has for each shard."""
    chunks: list[list[Batch | None]] = [[] for _ in range(len(picks[0].part))]
    begin = 0
    for each in picks:
        held = stores[begin : begin + each.stores]
        begin += each.stores
        for chunk, part, row in zip(chunks, each.part, each.row, strict=True):
            columns = {name: pick_rows([store[name] for store in held], part, row) for name in each.names if held}
            chunk.append(Batch(columns) if columns else None)
    return list(chunks)


def _plan_family(
    family: RemoteRows, columns: Mapping[str, RemoteColumn], rows: Sequence[np.ndarray], num_pickers: int
) -> tuple[list[Pick], list[tuple[RowStore, ...]], list[ChunkLayout]]:
    """Return for each picker its pick and stores, and for each shard its layout."""
    num_stores = len(family.stores)
    picker_of = np.arange(num_stores) * num_pickers // num_stores
    first = np.searchsorted(picker_of, np.arange(num_pickers + 1))
    sizes = [len(index) for index in rows]
    index = np.concatenate(rows)
    shard = np.repeat(np.arange(len(rows)), sizes)
    part, row = family.part[index], family.row[index]
    picker = picker_of[part]
    place = np.zeros(len(index), dtype=np.int64)
    picks = []
    names = tuple(dict.fromkeys(column.name for column in columns.values()))
    for number in range(num_pickers):
        mine = np.flatnonzero(picker == number)
        offsets = np.searchsorted(shard[mine], np.arange(len(rows) + 1))
        place[mine] = np.arange(len(mine)) - offsets[shard[mine]]
        own = Ragged(part[mine] - first[number], offsets)
        picks.append(Pick(names, int(first[number + 1] - first[number]), own, Ragged(row[mine], offsets)))
    ends = np.cumsum(sizes)
    zeroed = {name: column.zeroed[index] for name, column in columns.items() if column.zeroed is not None}
    stored = {name: column.name for name, column in columns.items()}
    layouts = [
        ChunkLayout(
            stored, picker[begin:end], place[begin:end], {name: each[begin:end] for name, each in zeroed.items()}
        )
        for begin, end in zip(ends - sizes, ends, strict=True)
    ]
    stores = [family.stores[first[number] : first[number + 1]] for number in range(num_pickers)]
    return picks, stores, layouts
