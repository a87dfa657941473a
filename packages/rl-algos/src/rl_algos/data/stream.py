"""Items of several datasets in a repeatable order that can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from rl_algos.data.config import Weight, weight_at
from rl_core.errors import DataChanged, DataError

T = TypeVar("T")


def permutation(size: int, *entropy: int) -> np.ndarray:
    """Return int64 `[size]`, a permutation that is equal on every machine and depends only on the entropy.

    Raw bits of PCG64, which numpy keeps stable (NEP 19); `Generator.permutation` may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(bits, kind="stable")


_ULP = 2.0**-53


class Shares:
    """Stride scheduling: the next draw is from the member that is due first. A member of weight w is due every `1 / w`;
    one of weight 0 is not drawn. The order depends only on the weights and the entropy.

    With entropy, a draw is due within 1 after its interval begins, at random, instead of at the end of the interval. So
    members of weight 1 come in another order in every pass, and each of them once before a member of at most this
    weight comes again.

    Args:
        weights: Weight of each member, such as a dataset, at least 0 and not all 0.
        entropy: Entropy of the order; None for the ends of intervals. With entropy, all weights are above 0.
    """

    def __init__(self, weights: Sequence[float] | np.ndarray, *, entropy: tuple[int, ...] | None = None) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)
        self.drawn = np.zeros(len(self.weights), dtype=np.int64)
        self._entropy = entropy
        # The draws until the last change of the weights, and when the interval of the next one began.
        self._drawn_before = np.zeros_like(self.drawn)
        self._due_before = np.zeros_like(self.weights)
        # When each member is due, and its random part: they follow from the position.
        self._due = self._lots = np.zeros_like(self.weights)
        self._arrange()

    def next(self) -> int:
        """Draw, and return the place of the member."""
        which = int(np.argmin(self._due))
        self.drawn[which] += 1
        if self._entropy is not None:
            # Only the bits of this member are computed, because there may be millions.
            self._lots[which] = (self._bits(self.drawn[which]).advance(which).random_raw() >> 11) * _ULP
        self._due[which] = self._next_due(which)
        return which

    def change(self, weights: Sequence[float] | np.ndarray) -> None:
        """Draw in proportion to other weights from here on. The remaining time to each member's next draw shrinks as
        its weight grows, so that frequent changes hold none back. A member whose weight was 0 begins an interval.
        """
        changed, now = np.asarray(weights, dtype=np.float64), float(self._due.min())
        if np.array_equal(changed, self.weights):
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            due = now + (self._due - now) * self.weights / changed
            begun = due - (1 / changed if self._entropy is None else self._lots)
        is_idle = (self.weights == 0) | (changed == 0)
        self._due_before = np.where(is_idle, now, begun)
        self._drawn_before, self.weights = self.drawn.copy(), changed
        self._due = self._next_due(slice(None))

    def state(self) -> Mapping[str, Any]:
        """Return the position, as JSON; with entropy, as arrays."""
        arrays = {
            "drawn": self.drawn,
            "weights_now": self.weights,
            "drawn_before": self._drawn_before,
            "due_before": self._due_before,
        }
        return {name: each.tolist() if self._entropy is None else each.copy() for name, each in arrays.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        self.drawn = np.array(state["drawn"], dtype=np.int64)
        # Positions of versions without changes of weights have the draws only.
        self.weights = np.array(state.get("weights_now", self.weights), dtype=np.float64)
        self._drawn_before = np.array(state.get("drawn_before", self._drawn_before), dtype=np.int64)
        self._due_before = np.array(state.get("due_before", self._due_before), dtype=np.float64)
        self._arrange()

    def _arrange(self) -> None:
        """Compute when each member is due from the position."""
        self._lots = np.zeros(len(self.drawn))
        if self._entropy is not None:
            for turn in np.unique(self.drawn):
                raw = self._bits(turn).random_raw(len(self.drawn))
                self._lots = np.where(self.drawn == turn, (raw >> np.uint64(11)) * _ULP, self._lots)
        self._due = self._next_due(slice(None))

    def _next_due(self, which: int | slice) -> Any:
        """Return when the next draw of members is due; infinity for the weight 0."""
        num_intervals = self.drawn[which] - self._drawn_before[which] + (self._entropy is None)
        with np.errstate(divide="ignore"):
            return self._due_before[which] + num_intervals / self.weights[which] + self._lots[which]

    def _bits(self, turn: int) -> Any:
        assert self._entropy is not None
        return np.random.PCG64(np.random.SeedSequence((*self._entropy, int(turn))))


class WeightedDraws:
    """The position of a stream that draws from datasets in proportion to their weights.

    Args:
        weights: Weights of the datasets, as configured.
        identity: Values that identify the data; they are compared with those in a saved position.
        digests: A digest of the rows of each dataset, which is compared as well.
    """

    def __init__(self, weights: Sequence[Weight], identity: Mapping[str, Any], digests: Sequence[str]) -> None:
        # Lists, as JSON has them, so that a saved position can be compared.
        plain = [each if isinstance(each, int | float) else [list(point) for point in each] for each in weights]
        self._configured = weights
        self._step = 1
        self._factors = np.ones(len(weights))
        self._shares = Shares(self._weights)
        self._identity = {**identity, "weights": plain, **({"digests": list(digests)} if digests else {})}

    def begin(self, step: int) -> None:
        """Draw with the weights that are configured for a step, from here on; steps are counted from 1."""
        self._step = step
        self._shares.change(self._weights)

    def weigh(self, factors: Sequence[float]) -> None:
        """Multiply the configured weights of the datasets by these factors, from here on."""
        self._factors = np.asarray(factors, dtype=np.float64)
        self._shares.change(self._weights)

    @property
    def _weights(self) -> np.ndarray:
        return self._factors * [weight_at(each, self._step) for each in self._configured]

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return int(self._shares.drawn.sum())

    def state(self) -> Mapping[str, Any]:
        """Return the position, as JSON."""
        return {**self._shares.state(), "step": self._step, "factors": self._factors.tolist(), **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            DataChanged: If the data, its weights or its order differ from those when the state was saved.
        """
        self.check(state)
        # Positions of earlier versions have neither; their curriculum gives the factors after its next step.
        self._step, self._factors = state.get("step", 1), np.array(state.get("factors", self._factors), np.float64)
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

    After `choose_items`, items have weights as well. The first pass over a dataset is the same; from then on an item of
    weight w, at most 1, comes at least once in `1 / w + 2` epochs of its dataset.

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
        weights: Sequence[Weight] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_num_epochs: int | None = None,
        digests: Sequence[str] = (),
    ) -> None:
        if not datasets or not all(len(dataset) for dataset in datasets):
            raise DataError(f"a stream needs datasets with items, got sizes {[len(dataset) for dataset in datasets]}")
        self.datasets = tuple(datasets)
        self._sizes = [len(dataset) for dataset in datasets]
        self.num_items = sum(self._sizes)
        shares = [float(size) for size in self._sizes] if weights is None else list(weights)
        firsts = [weight_at(each, 1) for each in shares]
        if len(firsts) != len(datasets) or min(firsts) < 0 or not any(firsts):
            raise DataError(f"expected {len(datasets)} weights above 0, one per dataset, got {list(weights or ())}")
        super().__init__(shares, {"sizes": self._sizes, "seed": seed, "shuffle": shuffle}, digests)
        self._seed = seed
        self._shuffle = shuffle
        self._max_num_epochs = max_num_epochs
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._items: list[Shares] = []
        self._key: Callable[[T], str] | None = None
        self._places: dict[str, tuple[int, int]] = {}

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

    def choose_items(self, key: Callable[[T], str]) -> None:
        """Draw the items of each dataset by weights, all 1 until `weigh_items`; to be called before the first draw.

        Args:
            key: Function from an item to its id, for `place_of`.
        """
        self._key = key
        self._items = [
            Shares(np.ones(size), entropy=(self._seed, which) if self._shuffle else None)
            for which, size in enumerate(self._sizes)
        ]

    def weigh_items(self, which: int, weights: np.ndarray) -> None:
        """Draw the items of a dataset in proportion to weights from here on.

        Args:
            which: Number of the dataset.
            weights: `[items]`, above 0 and at most 1.
        """
        self._items[which].change(weights)

    def place_of(self, id: str) -> tuple[int, int]:
        """Return the dataset and the position in it of an item that was drawn after `choose_items`, by its id."""
        return self._places[id]

    def take(self, count: int) -> list[T]:
        """Return the next items; fewer at the end of the last epoch."""
        left = self.num_left
        items = []
        for _ in range(count if left is None else min(count, left)):
            # With sizes as weights, passes over all datasets end together.
            which = self._shares.next()
            position = self._items[which].next() if self._items else self._position(which)
            item = self.datasets[which][position]
            if self._key is not None:
                self._places[self._key(item)] = which, position
            items.append(item)
        return items

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), **({"items": [each.state() for each in self._items]} if self._items else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        for item, position in zip(self._items, state.get("items", ()), strict=False):
            item.restore(position)

    def _position(self, which: int) -> int:
        """Return the position of the newest draw from a dataset whose items have no weights."""
        turn, position = divmod(int(self._shares.drawn[which]) - 1, self._sizes[which])
        if not self._shuffle:
            return position
        known = self._orders.get(which)
        if known is None or known[0] != turn:
            known = self._orders[which] = turn, permutation(self._sizes[which], self._seed, which, turn)
        return int(known[1][position])
