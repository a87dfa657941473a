"""Training rows of datasets with `streaming`, each made into tokens when it is drawn."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rl_algos.data.config import DataConfig
from rl_algos.data.encoding import Attempt, Failure
from rl_algos.data.example import Example
from rl_algos.data.examples import Dataset, Source
from rl_algos.data.flow import Flow, FlowStream
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

E = TypeVar("E")
T = TypeVar("T")


def flow_stream(
    datasets: Sequence[Dataset],
    config: DataConfig,
    encode: Callable[[Example], E],
    make: Callable[[Dataset, str, Example, E], T],
    *,
    length: Callable[[E], int],
    limit: int,
    seed: int,
    weights: Sequence[float] | None,
    max_num_epochs: int | None,
    needs_answer: bool = False,
) -> FlowStream[T]:
    """The rows of datasets with `streaming`, mixed and shuffled as configured.

    Args:
        datasets: Datasets to mix, all with `streaming`.
        config: Config section `data`.
        encode: Raises a `DataError` for an example that it refuses.
        make: Function from the dataset, the id of a row, its example and what `encode` returned to an item.
        length: Tokens of what `encode` returned.
        limit: Maximum number of tokens of an item.
        seed: Seed of the order.
        weights: Weight of each dataset in the mixture; None for a single dataset.
        max_num_epochs: Must be None, because the size of a streamed dataset is not known.
        needs_answer: True to leave out examples that have a solution and no answer.

    Raises:
        DataError: If some of the datasets stream and others do not, or an end is given.
    """
    at_hand = [dataset.name for dataset in datasets if dataset.source is None]
    if at_hand:
        missing = ", ".join(at_hand)
        raise DataError(f"`streaming` must be set for all training datasets or for none; missing for {missing}")
    flows = [
        Flow(
            dataset.name,
            _source(dataset).open_rows,
            _Make(dataset, config, encode, make, length, limit, needs_answer=needs_answer),
            block=dataset.settings.shuffle_buffer,
            entropy=(seed, which),
            shuffle=config.shuffle,
        )
        for which, dataset in enumerate(datasets)
    ]
    return FlowStream(flows, weights, max_num_epochs=max_num_epochs, digests=[dataset.digest for dataset in datasets])


def _source(dataset: Dataset) -> Source:
    assert dataset.source is not None
    return dataset.source


class _Make:
    """Makes an item of a row, or leaves it out, as the config says."""

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        encode: Callable[[Example], Any],
        make: Callable[[Dataset, str, Example, Any], Any],
        length: Callable[[Any], int],
        limit: int,
        *,
        needs_answer: bool,
    ) -> None:
        self._needs_answer = needs_answer
        self._dataset = dataset
        self._convert: Attempt[Example] = Attempt(_source(dataset).convert)
        self._encode = Attempt(encode)
        self._make = make
        self._length = length
        self._limit = limit
        self._rules = {"malformed": config.malformed, "overlong": config.overlong}
        self._left_out: Counter[str] = Counter()

    def __call__(self, number: int, row: Any) -> Any:
        example = self._convert(row)
        if isinstance(example, Failure):
            return self._leave_out("malformed", number, example.reason)
        if self._needs_answer and example.is_unanswered:
            return None
        encoded = self._encode(example)
        if isinstance(encoded, Failure):
            return self._leave_out("malformed", number, encoded.reason)
        if (length := self._length(encoded)) > self._limit:
            return self._leave_out("overlong", number, f"it has {length} tokens, more than {self._limit}")
        row_id = f"{self._dataset.name}:{self._dataset.settings.split or 'train'}:{number}"
        return self._make(self._dataset, row_id, example, encoded)

    def _leave_out(self, rule: str, number: int, reason: str) -> None:
        place = self._dataset.place_of(number)
        if self._rules[rule] == "error":
            raise DataError(f"{place}: {reason}; set data.{rule}: skip to exclude such rows")
        self._left_out[rule] += 1
        count = self._left_out[rule]
        if count & (count - 1) == 0:  # the first, and then ever fewer
            _log.warning("%s: %s; %d excluded so far (data.%s: skip)", place, reason, count, rule)
