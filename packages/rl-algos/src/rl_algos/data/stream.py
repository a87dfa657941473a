"""Items of several datasets in a repeatable order that can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from rl_core.errors import DataChanged, DataError

T = TypeVar("T")


def permutation(size: int, *entropy: int) -> np.ndarray:
    """Return int64 `[size]`, a permutation that is equal on every machine and depends only on the entropy.

    Raw bits of PCG64, which numpy keeps stable (NEP 19); `Generator.permutation` may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(bits, kind="stable")


class Shares:
    """Stride scheduling: the next draw is from the dataset whose draw is due first. A dataset of weight w is due every
    `1 / w`. The order depends only on the weights.

    Args:
        weights: Weights of each dataset, above 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)
        self.drawn = np.zeros(len(self.weights), dtype=np.int64)
        # The draws until the last change of the weights, and when the last of each was due.
        self._drawn_before = np.zeros_like(self.drawn)
        self._due_before = np.zeros_like(self.weights)

    def next(self) -> int:
        """Draw, and return the place of the dataset."""
        which = int(np.argmin(self._due()))
        self.drawn[which] += 1
        return which

    def change(self, weights: Sequence[float]) -> None:
        """Draw in proportion to other weights from here on. The remaining time to each dataset's next draw shrinks as
        its weight grows, so that frequent changes hold no dataset back.
        """
        due, changed = self._due(), np.asarray(weights, dtype=np.float64)
        now = due.min()
        due = now + (due - now) * self.weights / changed
        self._due_before, self._drawn_before, self.weights = due - 1 / changed, self.drawn.copy(), changed

    def state(self) -> Mapping[str, Any]:
        """Return the position, as JSON."""
        before = {"drawn_before": self._drawn_before.tolist(), "due_before": self._due_before.tolist()}
        return {"drawn": self.drawn.tolist(), "weights_now": self.weights.tolist(), **before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        self.drawn = np.asarray(state["drawn"], dtype=np.int64)
        # Positions of versions without changes of weights have the draws only.
        self.weights = np.asarray(state.get("weights_now", self.weights), dtype=np.float64)
        self._drawn_before = np.asarray(state.get("drawn_before", self._drawn_before), dtype=np.int64)
        self._due_before = np.asarray(state.get("due_before", self._due_before), dtype=np.float64)

    def _due(self) -> np.ndarray:
        """Return when the next draw of each dataset is due."""
        due: np.ndarray = self._due_before + (self.drawn - self._drawn_before + 1) / self.weights
        return due


class WeightedDraws:
    """The position of a stream that draws from datasets in proportion to their weights.

    Args:
        weights: Weights of the datasets, as configured.
        identity: Values that identify the data; they are compared with those in a saved position.
        digests: A digest of the rows of each dataset, which is compared as well.

    Attributes:
        weights: Weights of the datasets, as configured.
        weigh: Draws in proportion to other weights from here on.
    """

    def __init__(self, weights: Sequence[float], identity: Mapping[str, Any], digests: Sequence[str]) -> None:
        self.weights = weights
        self._shares = Shares(weights)
        self.weigh = self._shares.change
        self._identity = {**identity, **({"digests": list(digests)} if digests else {})}

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return int(self._shares.drawn.sum())

    def state(self) -> Mapping[str, Any]:
        """Return the position, as JSON."""
        return {**self._shares.state(), **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            DataChanged: If the data, its weights or its order differ from those when the state was saved.
        """
        self.check(state)
        self._shares.restore(state)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a `DataChanged` if a position is not one in this data; earlier versions saved less."""
        for name, value in self._identity.items():
            if state.get(name, value) != value:
                is_digest = name == "digests"
                change = "the rows have other contents" if is_digest else f"{name} was {state[name]} and is {value}"
                raise DataChanged(f"the data has changed since the checkpoint: {change}")


class Stream(WeightedDraws, Generic[T]):
    """Draws from datasets in proportion to their weights; each item of a dataset once before any of it comes again.

    The order depends only on the seed, the sizes and the weights, and the position is one count per dataset. An
    epoch is as many draws as there are items; without weights it holds every item exactly once.

    Args:
        datasets: Each a sequence of items.
        weights: Share of draws of each dataset; its number of items if None.
        seed: Seed of the order.
        shuffle: A new order for every pass over a dataset; otherwise the order of the items.
        max_num_epochs: Number of epochs; None for an endless stream.
        digests: A digest of the rows of each dataset, which is compared with the digest in a saved position.

    Attributes:
        datasets: The datasets that the stream draws from.
        num_items: Items of all datasets: the draws of one epoch.

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
        self.datasets = tuple(datasets)
        self._sizes = [len(dataset) for dataset in datasets]
        self.num_items = sum(self._sizes)
        shares = [float(each) for each in (self._sizes if weights is None else weights)]
        identity = {"sizes": self._sizes, "weights": shares, "seed": seed, "shuffle": shuffle}
        super().__init__(shares, identity, digests)
        self._seed = seed
        self._shuffle = shuffle
        self._max_num_epochs = max_num_epochs
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def num_left(self) -> int | None:
        """Draws to the end; None if there is no end."""
        return None if self._max_num_epochs is None else max(0, self._max_num_epochs * self.num_items - self.num_drawn)

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, with their fraction."""
        return self.num_drawn / self.num_items

    def num_batches(self, size: int) -> int | None:
        """Return the batches of this size from start to end, the last maybe smaller; None if there is no end."""
        return None if self._max_num_epochs is None else -(-self._max_num_epochs * self.num_items // size)

    def take(self, count: int) -> list[T]:
        """Return the next items; fewer at the end of the last epoch."""
        left = self.num_left
        items = []
        for _ in range(count if left is None else min(count, left)):
            # With sizes as weights, passes over all datasets end together.
            which = self._shares.next()
            turn, position = divmod(int(self._shares.drawn[which]) - 1, self._sizes[which])
            if self._shuffle:
                known = self._orders.get(which)
                if known is None or known[0] != turn:
                    known = self._orders[which] = turn, permutation(self._sizes[which], self._seed, which, turn)
                position = int(known[1][position])
            items.append(self.datasets[which][position])
        return items
