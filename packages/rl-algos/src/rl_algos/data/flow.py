"""Items of datasets that are read as they come, for those that do not fit a disk, and the length of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rl_algos.data.config import DataConfig, Weight
from rl_algos.data.encoding import EncodingFailure, attempt
from rl_algos.data.examples import Dataset
from rl_algos.data.rows.example import Example
from rl_algos.data.stream import Stream, WeightedDraws, permutation
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

E = TypeVar("E")
T = TypeVar("T")

FEW_STEPS = 10
"""Fewer optimizer steps than this hardly change a model."""

_UNBOUNDED = 2**62


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
        self.num_passes = 0
        self._start = self._next = 0
        self._taken = 0
        self._block: list[T] = []

    def at_hand(self) -> Sequence[T]:
        """Return the items of the block that is drawn from."""
        if not self._block:
            self._read_block(self._next)
        return self._block

    def draw(self) -> T:
        """Return the next item; raise a `DataError` if a whole pass has none."""
        while self._taken == len(self._block):
            self._read_block(self._next)
        self._taken += 1
        return self._block[self._taken - 1]

    def state(self) -> Mapping[str, int]:
        """Return the position, as JSON."""
        return {"pass": self.num_passes, "start": self._start, "taken": self._taken}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a position; raise a `DataError` if there are fewer rows there than when the state was saved."""
        self._rows, self._block, self._taken = None, [], 0
        self.num_passes, self._next = state["pass"], state["start"]
        if state["taken"]:
            self._read_block(state["start"])
        found = len(self._block) if self.num_passes == state["pass"] else 0
        if found < state["taken"]:
            raise DataError(
                f"the dataset {self.name!r} has changed since the checkpoint: the block at row {state['start']} has "
                f"{found} items, but {state['taken']} were taken from it. Restore the dataset, or start a new run"
            )
        self._start, self._taken = state["start"], state["taken"]

    def _read_block(self, start: int) -> None:
        """Read the block that begins with a row; after the last row, the first block of the next pass."""
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
            self._rows, self.num_passes = None, self.num_passes + 1
            self._read_block(0)
            return
        if self._shuffle:
            order = permutation(len(items), *self._entropy, self.num_passes, start)
            items = [items[place] for place in order]
        self._start, self._next, self._taken, self._block = start, number, 0, items


class FlowStream(WeightedDraws, Generic[T]):
    """Draws from datasets that are read as they come, in proportion to their weights, without an end.

    It takes the place of a `Stream`, whose datasets have a known end.

    Args:
        flows: One for each dataset.
        weights: Share of draws of each; None for a single dataset.
        max_num_epochs: Must be None, because the end of an epoch is not known.
        digests: A digest of the first rows of each dataset, which is compared with the digest in a saved position.

    Attributes:
        names: Names of the datasets.
        num_left: Draws to the end: None, because a flow does not end.

    Raises:
        DataError: If several flows have no weights, or an end is given.
    """

    num_left: None = None

    def __init__(
        self,
        flows: Sequence[Flow[T]],
        weights: Sequence[Weight] | None = None,
        *,
        max_num_epochs: int | None = None,
        digests: Sequence[str] = (),
    ) -> None:
        if max_num_epochs is not None:
            problem = "max_num_epochs cannot be used with `streaming`, because the size of the dataset is not known"
            raise DataError(f"{problem}. Set max_num_steps, and remove max_num_epochs")
        if len(flows) > 1 and weights is None:
            raise DataError("several datasets with `streaming` need a `weight` each, because their sizes are not known")
        self._flows = tuple(flows)
        self.names = [flow.name for flow in flows]
        super().__init__([1.0] if weights is None else weights, {"streamed": self.names}, digests)

    @property
    def datasets(self) -> tuple[Sequence[T], ...]:
        """The items of each dataset that are at hand."""
        return tuple(flow.at_hand() for flow in self._flows)

    @property
    def epoch(self) -> float:
        """Complete passes over the dataset that has been passed the least."""
        return float(min(flow.num_passes for flow in self._flows))

    def num_batches(self, _size: int) -> None:
        """Return the batches to the end: None, because a flow does not end."""
        return None

    def take(self, count: int) -> list[T]:
        """Return the next items."""
        return [self._flows[self._shares.next()].draw() for _ in range(count)]

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "flows": [dict(flow.state()) for flow in self._flows]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.check(state)
        for flow, position in zip(self._flows, state["flows"], strict=True):
            flow.restore(position)
        super().restore(state)


def flow_stream(
    datasets: Sequence[Dataset],
    config: DataConfig,
    encode: Callable[[Example], E],
    make: Callable[[Dataset, str, Example, E], T],
    *,
    length: Callable[[E], int],
    limit: int,
    seed: int,
    weights: Sequence[Weight] | None,
    max_num_epochs: int | None,
    needs_answer: bool = False,
) -> FlowStream[T]:
    """Return the rows of datasets with `streaming`, mixed and shuffled as configured, each encoded when it is drawn.

    Args:
        datasets: Datasets to mix, all with `streaming`.
        config: Config section `data`.
        encode: Raises a `DataError` for an example that it refuses.
        make: Function from the dataset, the id of a row, its example and the result of `encode` to an item.
        length: Number of tokens of a result of `encode`.
        limit: Maximum number of tokens of an item.
        seed: Seed of the order.
        weights: Weight of each dataset in the mixture; None for a single dataset.
        max_num_epochs: Must be None, because the size of a streamed dataset is not known.
        needs_answer: True to leave out examples that have a solution and no answer.

    Raises:
        DataError: If some of the datasets stream and others do not, or an end is given.
    """
    if at_hand := [dataset.name for dataset in datasets if dataset.source is None]:
        missing = ", ".join(at_hand)
        raise DataError(f"`streaming` must be set for all training datasets or for none; missing for {missing}")
    left_out: Counter[tuple[str, str]] = Counter()

    def made(dataset: Dataset, number: int, row: Any) -> T | None:
        assert dataset.source is not None
        example = attempt(dataset.source.convert, row)
        encoded: E | EncodingFailure
        if isinstance(example, EncodingFailure):
            encoded = example
        elif needs_answer and example.is_unanswered:
            return None
        else:
            encoded = attempt(encode, example)
        if isinstance(encoded, EncodingFailure):
            rule, on_fault, reason = "malformed", config.malformed, encoded.reason
        elif (size := length(encoded)) > limit:
            rule, on_fault, reason = "overlong", config.overlong, f"it has {size} tokens, more than {limit}"
        else:
            assert isinstance(example, Example)
            return make(dataset, f"{dataset.name}:{dataset.settings.split or 'train'}:{number}", example, encoded)
        place = dataset.place_of(number)
        if on_fault == "error":
            raise DataError(f"{place}: {reason}; set data.{rule}: skip to exclude such rows")
        left_out[dataset.name, rule] += 1
        count = left_out[dataset.name, rule]
        if count & (count - 1) == 0:  # The first is logged, and then ever fewer.
            _log.warning("%s: %s; %d excluded so far (data.%s: skip)", place, reason, count, rule)
        return None

    flows = []
    for which, dataset in enumerate(datasets):
        assert dataset.source is not None
        block, rows = dataset.settings.shuffle_buffer, dataset.source.open_rows
        make_item = partial(made, dataset)
        flows.append(Flow(dataset.name, rows, make_item, block=block, entropy=(seed, which), shuffle=config.shuffle))
    return FlowStream(flows, weights, max_num_epochs=max_num_epochs, digests=[dataset.digest for dataset in datasets])


def tell_extent(
    stream: Stream | FlowStream,
    batch: int,
    *,
    unit: str,
    size_key: str,
    max_num_steps: int | None,
    max_num_epochs: int | None,
) -> None:
    """Log the steps and epochs that a run will train for, and warn of so few steps, or so small a part of the requested
    epochs, that the user may not have meant it.

    Args:
        stream: Data of the run; nothing is logged if its size is not known.
        batch: Items that a step draws.
        unit: Name of the items, such as `rows`.
        size_key: Key of the config that sets `batch`.
        max_num_steps: Maximum number of steps of the run; None for no limit.
        max_num_epochs: Maximum number of epochs of the run; None for no limit.
    """
    if isinstance(stream, FlowStream):
        return
    items = stream.num_items
    by_epochs = stream.num_batches(batch)
    steps = min(bound for bound in (max_num_steps, by_epochs, _UNBOUNDED) if bound is not None)
    an_epoch = items / batch
    if steps == by_epochs and steps < FEW_STEPS:
        _log.warning(
            "the run has only %s: %d %s in steps of %d (%s). If that is too few, lower that number or increase "
            "max_num_epochs",
            *(_counted(steps, "step"), items, unit, batch, size_key),
        )
    elif max_num_epochs is not None and steps < an_epoch:
        epochs, all_steps = _counted(max_num_epochs, "epoch"), -(-items // batch)
        _log.warning(
            "the run ends after max_num_steps, %d, which is %.2g of the %s in max_num_epochs: an epoch has %d steps "
            "of %d %s; increase or remove max_num_steps to train on all of them",
            *(steps, steps / an_epoch, epochs, all_steps, batch, unit),
        )
    elif steps < _UNBOUNDED:
        drawn = steps * batch if stream.num_left is None else min(steps * batch, stream.num_left)
        counts = _counted(steps, "step"), _counted(drawn / items, "epoch")
        _log.info("%d %s, %d a step: %s, %s", items, unit, batch, *counts)


def _counted(number: float, unit: str) -> str:
    return f"{number:.3g} {unit}" + ("" if number == 1 else "s")
