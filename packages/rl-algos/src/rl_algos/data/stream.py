"""Items of several datasets in a repeatable order that can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from rl_algos.data.permutation import permutation
from rl_algos.data.shares import Shares
from rl_core.errors import DataChanged, DataError

T = TypeVar("T")


def check_same(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Compare what identifies data with what a checkpoint holds of it; earlier versions saved less.

    Raises:
        DataChanged: If the data differ.
    """
    for name, value in present.items():
        if saved.get(name, value) != value:
            what = "the rows have other contents" if name == "digests" else f"{name} was {saved[name]} and is {value}"
            raise DataChanged(f"the data has changed since the checkpoint: {what}")


class Stream(Generic[T]):
    """Draws from datasets in proportion to their weights; each item of a dataset once before any of it comes again.

    The order depends only on the seed, the sizes and the weights, and the position is one count per dataset. An
    epoch is as many draws as there are items; without weights it holds every item exactly once.

    Args:
        datasets: Each a sequence of items.
        weights: Share of draws of each dataset; its number of items if None.
        seed: Seed of the order.
        shuffle: A new order for every pass over a dataset; otherwise the order of the items.
        max_num_epochs: Number of epochs; None for an endless stream.
        digests: A digest of the rows of each dataset, which a saved position is compared by.

    Raises:
        DataError: If there is no item.
    """

    def __init__(
        self,
        datasets: Sequence[Sequence[T]],
        weights: Sequence[float] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_num_epochs: int | None = None,
        digests: Sequence[str] = (),
    ) -> None:
        if not datasets or not all(len(dataset) for dataset in datasets):
            raise DataError(f"a stream needs datasets with items, got sizes {[len(dataset) for dataset in datasets]}")
        if weights is not None and (len(weights) != len(datasets) or min(weights) <= 0):
            raise DataError(f"expected {len(datasets)} positive weights, one per dataset, got {list(weights)}")
        self._datasets = tuple(datasets)
        self._sizes = [len(dataset) for dataset in datasets]
        self._weights = [float(each) for each in (self._sizes if weights is None else weights)]
        self._shares = Shares(self._weights)
        self._seed = seed
        self._shuffle = shuffle
        self._max_num_epochs = max_num_epochs
        self._digests = list(digests)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def datasets(self) -> tuple[Sequence[T], ...]:
        """The datasets that the stream draws from."""
        return self._datasets

    @property
    def weights(self) -> Sequence[float]:
        """Weights of the datasets, as configured."""
        return self._weights

    def weigh(self, weights: Sequence[float]) -> None:
        """Draw in proportion to these weights from here on."""
        self._shares.change(weights)

    @property
    def num_items(self) -> int:
        """Items of all datasets: the draws of one epoch."""
        return sum(self._sizes)

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return int(self._shares.drawn.sum())

    @property
    def num_left(self) -> int | None:
        """Draws to the end; None if there is no end."""
        return None if self._max_num_epochs is None else max(0, self._max_num_epochs * self.num_items - self.num_drawn)

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, with their fraction."""
        return self.num_drawn / self.num_items

    def num_batches(self, size: int) -> int | None:
        """Batches of this size from start to end, the last maybe smaller; None if there is no end."""
        return None if self._max_num_epochs is None else -(-self._max_num_epochs * self.num_items // size)

    def take(self, count: int) -> list[T]:
        """The next items; fewer at the end of the last epoch."""
        left = self.num_left
        return [self._draw() for _ in range(count if left is None else min(count, left))]

    def state(self) -> Mapping[str, Any]:
        """The position, as JSON."""
        return {**self._shares.state(), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            DataChanged: If the data, its weights or its order differ from those when the state was saved.
        """
        self.check(state)
        self._shares.restore(state)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a `DataChanged` if a position is not one in this data."""
        check_same(state, self._identity())

    def _identity(self) -> dict[str, Any]:
        return {
            "sizes": self._sizes,
            "weights": self._weights,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **({"digests": self._digests} if self._digests else {}),
        }

    def _draw(self) -> T:
        # with sizes as weights, passes over all datasets end together
        which = self._shares.next()
        turn, position = divmod(int(self._shares.drawn[which]) - 1, self._sizes[which])
        if self._shuffle:
            position = int(self._order(which, turn)[position])
        return self._datasets[which][position]

    def _order(self, which: int, turn: int) -> np.ndarray:
        known = self._orders.get(which)
        if known is None or known[0] != turn:
            known = self._orders[which] = turn, permutation(self._sizes[which], self._seed, which, turn)
        return known[1]
