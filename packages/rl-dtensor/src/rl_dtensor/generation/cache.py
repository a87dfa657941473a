"""Keys and values, and states, of the rows being decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils

_SLACK = 64


class RowLayer(cache_utils.CacheLayerMixin):
    """One layer's keys and values, `[rows, heads, columns, head_dim]`, with room to grow in place.

    A row's tokens are flush with the last column, so distances between columns are distances between positions and a
    sliding window's mask is right for every row.
    """

    is_sliding = False
    keys: Tensor  # It is None until the layer is initialized.
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._columns = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _room(key_states, 0)
        self.values = _room(value_states, 0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            RowLayer.lazy_initialization(self, key_states, value_states)
        start, end = self._columns, self._columns + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _room(self.keys, end)
            self.values = _room(self.values, end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self._columns = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._columns

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Drop all other rows and the columns before `first_column`."""
        if not self.is_initialized:  # It uses the keys of another layer.
            return
        self.keys = _room(self.keys[:, :, first_column : self._columns].index_select(0, rows), 0)
        self.values = _room(self.values[:, :, first_column : self._columns].index_select(0, rows), 0)
        self._columns -= first_column

    def join(self, other: Self) -> None:
        """Put the rows of another layer below, all flush with the last column."""
        if not self.is_initialized:
            return
        columns = max(self._columns, other._columns)
        self.keys = _below(self.keys[:, :, : self._columns], other.keys[:, :, : other._columns], columns)
        self.values = _below(self.values[:, :, : self._columns], other.values[:, :, : other._columns], columns)
        self._columns = columns


class RowStates(cache_utils.LinearAttentionLayer):
    """One layer's states of each row, of its convolution and of its recurrence. No row may be padded."""

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Drop all other rows."""
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state.index_select(0, rows)

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

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Drop all other rows, and the columns before the first."""
        RowStates.keep(self, rows, first_column)
        RowLayer.keep(self, rows, first_column)

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

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Drop all other rows, and the columns before the first."""
        for layer in self.layers:
            layer.keep(rows, first_column)

    def join(self, other: RowCache) -> None:
        """Put the rows of another cache below."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)


def _room(states: Tensor, columns: int) -> Tensor:
    """Copy states with free columns at the end, at least `columns` together."""
    rows, heads, present, size = states.shape
    grown = states.new_empty(rows, heads, max(columns, present) * 5 // 4 + _SLACK, size)
    grown[:, :, :present] = states
    return grown


def _below(upper: Tensor, lower: Tensor, columns: int) -> Tensor:
    rows = upper.shape[0] + lower.shape[0]
    # Padding must be finite: attention multiplies it by 0.
    joined = upper.new_zeros(rows, upper.shape[1], columns + columns // 4 + _SLACK, upper.shape[3])
    joined[: upper.shape[0], :, columns - upper.shape[2] : columns] = upper
    joined[upper.shape[0] :, :, columns - lower.shape[2] : columns] = lower
    return joined
