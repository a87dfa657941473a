"""Keys and values, and states, of the rows being decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils

_SLACK = 64


class RowLayer(cache_utils.CacheLayerMixin):
    """One layer's keys and values, `[rows, heads, columns, head_dim]`, at the front of pages with room for more.

    A row's tokens are flush with the last column, so distances between columns are distances between positions and a
    sliding window's mask is right for every row.
    """

    is_sliding = False
    keys: Tensor  # It is None until the layer is initialized.
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._pages: list[Tensor] = []
        self._first = self._end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states.narrow(2, 0, 0), value_states.narrow(2, 0, 0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            RowLayer.lazy_initialization(self, key_states, value_states)
        count = key_states.shape[2]
        if self._end + count > self.keys.shape[2]:
            self._move(len(self.keys), self.get_seq_length() + count)
        self.keys.narrow(2, self._end, count).copy_(key_states)
        self.values.narrow(2, self._end, count).copy_(value_states)
        self._end += count
        return self._live(self.keys), self._live(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._end - self._first

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def keep(self, rows: Sequence[int], num_columns: int) -> None:
        """Drop all other rows, and all but the last columns.

        Args:
            rows: Row that is in each place afterwards: the one that was there, or a later one.
            num_columns: Columns that stay.
        """
        if not self.is_initialized:  # It uses the keys of another layer.
            return
        self._first = self._end - num_columns
        for states in (self._live(self.keys), self._live(self.values)):
            for place, row in enumerate(rows):
                if place != row:
                    states[place] = states[row]
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]

    def join(self, other: Self) -> None:
        """Put the rows of another layer below, all flush with the last column."""
        if not self.is_initialized:
            return
        present, rows = len(self.keys), len(self.keys) + len(other.keys)
        columns = other.get_seq_length()
        padding = max(0, columns - self.get_seq_length())
        if padding or rows > len(self._pages[0]):
            self._move(rows * 5 // 4, padding + self.get_seq_length(), padding)
        self.keys, self.values = (pages[:rows] for pages in self._pages)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine[present:, :, self._first : self._end - columns] = 0
            mine[present:, :, self._end - columns : self._end] = other._live(theirs)

    def _live(self, states: Tensor) -> Tensor:
        return states.narrow(2, self._first, self._end - self._first)

    def _move(self, room: int, num_columns: int, padding: int = 0) -> None:
        """Move all rows to pages for `room` rows, and for these columns and a quarter more.

        Args:
            room: Number of rows, at least those that are here.
            num_columns: Number of columns, at least those that are here with the padding.
            padding: Columns of zeros before each row. Padding must be finite: attention multiplies it by 0.
        """
        rows, end = len(self.keys), padding + self.get_seq_length()
        held, self._pages = (self.keys, self.values), []
        for states in held:
            pages = states.new_empty(room, states.shape[1], num_columns * 5 // 4 + _SLACK, states.shape[3])
            pages[:rows, :, :padding] = 0
            pages[:rows, :, padding:end] = self._live(states)
            self._pages.append(pages)
        self.keys, self.values = (pages[:rows] for pages in self._pages)
        self._first, self._end = 0, end


class RowStates(cache_utils.LinearAttentionLayer):
    """One layer's states of each row, of its convolution and of its recurrence. No row may be padded."""

    def keep(self, rows: Sequence[int], num_columns: int) -> None:
        """Drop all other rows."""
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state.index_select(0, torch.tensor(rows, device=state.device))

    def join(self, other: Self) -> None:
        """Put the rows of another layer below."""
        pairs = ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states))
        for mine, theirs in pairs:
            for index, state in mine.items():
                if state is not None:
                    mine[index] = torch.cat([state, cast("Tensor", theirs[index])])


class RowStatesAndKeys(RowStates, RowLayer):
    """One layer's states, and keys and values in addition to them."""

    def __init__(self) -> None:
        RowLayer.__init__(self)
        RowStates.__init__(self)

    def keep(self, rows: Sequence[int], num_columns: int) -> None:
        """Drop all other rows, and all but the last columns."""
        RowStates.keep(self, rows, num_columns)
        RowLayer.keep(self, rows, num_columns)

    def join(self, other: Self) -> None:
        """Put the rows of another layer below."""
        RowStates.join(self, other)
        RowLayer.join(self, other)


Kind = type[RowLayer] | type[RowStates]

_KINDS: dict[type, Kind] = {
    cache_utils.DynamicLayer: RowLayer,
    cache_utils.DynamicSlidingWindowLayer: RowLayer,
    cache_utils.LinearAttentionLayer: RowStates,
    cache_utils.LinearAttentionAndFullAttentionLayer: RowStatesAndKeys,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: RowStatesAndKeys,
}
"""Kind of a layer in the cache of `transformers` to the kind here."""


def row_layers(config: PreTrainedConfig) -> tuple[Kind, ...]:
    """Return the kind of every layer of a model's cache.

    Raises:
        ValueError: If a layer keeps something else.
    """
    layers = cache_utils.DynamicCache(config=config).layers
    foreign = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KINDS})
    if foreign:
        raise ValueError(f"its layers keep more than keys and values, or a state (transformers: {', '.join(foreign)})")
    return tuple(_KINDS[type(layer)] for layer in layers)


def has_states(kinds: Sequence[Kind]) -> bool:
    """Return whether some layers carry a state of each row. Then no row may be padded, and only one token at a time may
    continue a row."""
    return any(issubclass(kind, RowStates) for kind in kinds)


class RowCache(cache_utils.Cache):
    """A layer for each of the model.

    Args:
        kinds: Kinds of the layers, by `row_layers`.
    """

    layers: list[Any]

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__(layers=[kind() for kind in kinds])

    def keep(self, rows: Sequence[int], num_columns: int) -> None:
        """Drop all other rows, and all but the last columns; see `RowLayer.keep`."""
        for layer in self.layers:
            layer.keep(rows, num_columns)

    def join(self, other: RowCache) -> None:
        """Put the rows of another cache below."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)
