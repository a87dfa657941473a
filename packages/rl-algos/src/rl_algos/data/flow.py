"""Items of datasets that are read as they come, for those that do not fit a disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rl_algos.data.permutation import permutation
from rl_algos.data.shares import Shares
from rl_algos.data.stream import check_same
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Flow(Generic[T]):
    """Items of one dataset in passes over it, shuffled within blocks.

    A block holds the next items of a pass; its order depends only on the seed and its place. So a position is the
    row that the block begins with and the items taken of it, and a restored flow reads that block again.

    Args:
        name: Name of the dataset.
        open_rows: Function from a number of rows to skip to the remaining rows of the pass.
        make: Function from the number of a row and the row to an item; None leaves the row out.
        block: Items of a block.
        entropy: Numbers that the order follows from.
        shuffle: True if items of a block are shuffled.
    """

    def __init__(
        self,
        name: str,
        open_rows: Callable[[int], Iterator[Any]],
        make: Callable[[int, Any], T | None],
        *,
        block: int,
        entropy: Sequence[int],
        shuffle: bool,
    ) -> None:
        self.name = name
        self._open_rows = open_rows
        self._make = make
        self._size = block
        self._entropy = tuple(entropy)
        self._shuffle = shuffle
        self._rows: Iterator[Any] | None = None
        self._pass = 0
        self._start = self._next = 0
        self._taken = 0
        self._block: list[T] = []

    @property
    def num_passes(self) -> int:
        """Passes that are complete."""
        return self._pass

    def at_hand(self) -> Sequence[T]:
        """The items of the block that is drawn from."""
        if not self._block:
            self._read_block(self._next)
        return self._block

    def draw(self) -> T:
        """The next item; raises a `DataError` if a whole pass has none."""
        while self._taken == len(self._block):
            self._read_block(self._next)
        self._taken += 1
        return self._block[self._taken - 1]

    def state(self) -> Mapping[str, int]:
        """The position, as JSON."""
        return {"pass": self._pass, "start": self._start, "taken": self._taken}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a position; raises a `DataError` if the rows there are fewer than when the state was saved."""
        self._rows, self._block, self._taken = None, [], 0
        self._pass, self._next = state["pass"], state["start"]
        if state["taken"]:
            self._read_block(state["start"])
        found = len(self._block) if self._pass == state["pass"] else 0
        if found < state["taken"]:
            raise DataError(
                f"the dataset {self.name!r} has changed since the checkpoint: the block at row {state['start']} has "
                f"{found} items, but {state['taken']} were taken from it. Restore the dataset, or start a new run"
            )
        self._start, self._taken = state["start"], state["taken"]

    def _read_block(self, start: int) -> None:
        """Read the block that begins with a row; after the last row, that of the next pass."""
        if self._rows is None:
            self._rows = self._open_rows(start)
        items: list[T] = []
        number = start
        for row in self._rows:
            item = self._make(number, row)
            number += 1
            if item is not None:
                items.append(item)
                if len(items) == self._size:
                    break
        if not items:
            if start == 0:
                raise DataError(f"the dataset {self.name!r} has no rows that can be used")
            self._rows, self._pass = None, self._pass + 1
            self._read_block(0)
            return
        if self._shuffle:
            order = permutation(len(items), *self._entropy, self._pass, start)
            items = [items[place] for place in order]
        self._start, self._next, self._taken, self._block = start, number, 0, items


class FlowStream(Generic[T]):
    """Draws from datasets that are read as they come, in proportion to their weights, without an end.

    It is in the place of a `Stream`, whose datasets have an end that is known.

    Args:
        flows: One for each dataset.
        weights: Share of draws of each; None for a single dataset.
        max_num_epochs: Must be None, as nobody knows where an epoch ends.
        digests: A digest of the first rows of each dataset, which a saved position is compared by.

    Raises:
        DataError: If several flows have no weights, or an end is given.
    """

    def __init__(
        self,
        flows: Sequence[Flow[T]],
        weights: Sequence[float] | None = None,
        *,
        max_num_epochs: int | None = None,
        digests: Sequence[str] = (),
    ) -> None:
        if max_num_epochs is not None:
            raise DataError(
                "max_num_epochs cannot be used with `streaming`, because the size of the dataset is not known. Set "
                "max_num_steps, and remove max_num_epochs"
            )
        if len(flows) > 1 and weights is None:
            raise DataError("several datasets with `streaming` need a `weight` each, because their sizes are not known")
        self._flows = tuple(flows)
        self._digests = list(digests)
        self._weights = [1.0] if weights is None else [float(each) for each in weights]
        self._shares = Shares(self._weights)

    @property
    def names(self) -> list[str]:
        """Names of the datasets."""
        return [flow.name for flow in self._flows]

    @property
    def datasets(self) -> tuple[Sequence[T], ...]:
        """The items of each dataset that are at hand."""
        return tuple(flow.at_hand() for flow in self._flows)

    @property
    def weights(self) -> Sequence[float]:
        """Weights of the datasets, as configured."""
        return self._weights

    def weigh(self, weights: Sequence[float]) -> None:
        """Draw in proportion to these weights from here on."""
        self._shares.change(weights)

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return int(self._shares.drawn.sum())

    @property
    def num_left(self) -> None:
        """Draws to the end: None, as a flow does not end."""
        return None

    @property
    def epoch(self) -> float:
        """Complete passes over the dataset that has been passed the least."""
        return float(min(flow.num_passes for flow in self._flows))

    def num_batches(self, _size: int) -> None:
        """Batches to the end: None, as a flow does not end."""
        return None

    def take(self, count: int) -> list[T]:
        """The next items."""
        return [self._draw() for _ in range(count)]

    def state(self) -> Mapping[str, Any]:
        """The position, as JSON."""
        flows = [dict(flow.state()) for flow in self._flows]
        return {**self._shares.state(), "flows": flows, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; raises a `DataChanged` if the data or its weights differ from those of the state."""
        self.check(state)
        for flow, position in zip(self._flows, state["flows"], strict=True):
            flow.restore(position)
        self._shares.restore(state)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a `DataChanged` if a position is not one in this data."""
        check_same(state, self._identity())

    def _identity(self) -> dict[str, Any]:
        digests = {"digests": self._digests} if self._digests else {}
        return {"streamed": self.names, "weights": self._weights, **digests}

    def _draw(self) -> T:
        return self._flows[self._shares.next()].draw()
