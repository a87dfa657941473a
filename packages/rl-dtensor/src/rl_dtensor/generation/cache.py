"""Keys and values of the rows being decoded."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_SLACK = 64


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, `[rows, heads, columns, head_dim]`, with room to grow in place.

    A row's tokens are flush with the last column, so distances between columns are distances between positions and a
    sliding window's mask is right for every row.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self._columns = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _room(key_states, 0)
        self.values = _room(value_states, 0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
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
        self.keys = _room(self.keys[:, :, first_column : self._columns].index_select(0, rows), 0)
        self.values = _room(self.values[:, :, first_column : self._columns].index_select(0, rows), 0)
        self._columns -= first_column

    def join(self, other: RowLayer) -> None:
        """Put the rows of another layer below, all flush with the last column."""
        columns = max(self._columns, other._columns)
        self.keys = _below(self.keys[:, :, : self._columns], other.keys[:, :, : other._columns], columns)
        self.values = _below(self.values[:, :, : self._columns], other.values[:, :, : other._columns], columns)
        self._columns = columns


class RowCache(Cache):
    """A `RowLayer` per layer of the model."""

    layers: list[RowLayer]

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowLayer)

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Drop all other rows, and the columns before the first."""
        for layer in self.layers:
            layer.keep(rows, first_column)

    def join(self, other: RowCache) -> None:
        """Put the rows of another cache below."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)


def _room(states: Tensor, columns: int) -> Tensor:
    """A copy with free columns behind, at least `columns` together."""
    rows, heads, present, size = states.shape
    grown = states.new_empty(rows, heads, max(columns, present) * 5 // 4 + _SLACK, size)
    grown[:, :, :present] = states
    return grown


def _below(upper: Tensor, lower: Tensor, columns: int) -> Tensor:
    rows = upper.shape[0] + lower.shape[0]
    # zeros: attention multiplies padding by 0, which gives 0 only for finite values
    joined = upper.new_zeros(rows, upper.shape[1], columns + columns // 4 + _SLACK, upper.shape[3])
    joined[: upper.shape[0], :, columns - upper.shape[2] : columns] = upper
    joined[upper.shape[0] :, :, columns - lower.shape[2] : columns] = lower
    return joined
