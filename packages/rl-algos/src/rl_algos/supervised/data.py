"""Rows that an algorithm trains and validates on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_algos.data.config import DataConfig, Weight
from rl_algos.data.examples import Dataset, Datasets
from rl_algos.data.flow import FlowStream, tell_extent
from rl_algos.data.prompts import weights_of
from rl_algos.data.rows.lazily import Lazily
from rl_algos.data.stream import Stream
from rl_algos.supervised.config import SupervisedConfig
from rl_core.errors import DataError
from rl_core.model_config import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class SupervisedData(Generic[T]):
    """Data to train and validate on.

    Args:
        train: Training rows in their order.
        validation: Batches of rows by the name of their dataset; empty if there is no validation.
    """

    train: Stream[T] | FlowStream[T]
    validation: Mapping[str, Sequence[Sequence[T]]]


def supervised_data(
    section: SupervisedConfig,
    data: DataConfig,
    policy: ModelConfig,
    datasets: Datasets,
    rows_of: Callable[[Dataset], Sequence[T]],
    size_of: Callable[[T], float] | None = None,
    flow_of: Callable[[Sequence[Dataset]], FlowStream[T]] | None = None,
) -> SupervisedData[T]:
    """Return the rows of all datasets, mixed as configured for training and in batches for validation.

    Args:
        section: Config section of the algorithm.
        data: Config section `data`.
        policy: Config section of the model, with its batch sizes.
        datasets: Datasets for training and validation.
        rows_of: Function from a dataset to its rows.
        size_of: Function from a row to its share when datasets are mixed by weight; None if all rows count alike.
        flow_of: Function from datasets with `streaming` to a stream of their rows; None if the algorithm cannot learn
            from such datasets.
    """
    train = _train(section, data, datasets.train, rows_of, size_of, flow_of)
    tell_extent(
        train,
        policy.train_global_batch_size,
        unit="rows",
        size_key="policy.train_global_batch_size",
        max_num_steps=section.max_num_steps,
        max_num_epochs=section.max_num_epochs,
    )
    rows = section.val_global_batch_size or policy.train_global_batch_size
    held_out: dict[str, Sequence[T]] = {}
    for dataset in datasets.validation:
        found, more = held_out.get(dataset.name), rows_of(dataset)
        held_out[dataset.name] = more if found is None else [*found, *more]

    def batches(found: Sequence[T]) -> Sequence[Sequence[T]]:
        count = min(-(-len(found) // rows), section.val_batches or sys.maxsize)
        return Lazily(count, lambda index: found[index * rows : (index + 1) * rows])

    return SupervisedData(train, {name: batches(found) for name, found in held_out.items()})


def _train(
    section: SupervisedConfig,
    data: DataConfig,
    datasets: Sequence[Dataset],
    rows_of: Callable[[Dataset], Sequence[T]],
    size_of: Callable[[T], float] | None,
    flow_of: Callable[[Sequence[Dataset]], FlowStream[T]] | None,
) -> Stream[T] | FlowStream[T]:
    if streamed := [dataset.name for dataset in datasets if dataset.source is not None]:
        if flow_of is None or size_of is not None:
            raise DataError(
                f"`streaming` of {', '.join(streamed)} is only for reinforcement learning, and for SFT with "
                "sft.mix_by: rows. Remove it, or set data_path to a download"
            )
        return flow_of(datasets)
    rows, weights = [rows_of(dataset) for dataset in datasets], weights_of(datasets)
    if weights is not None and size_of is not None:
        sizes = [sum(map(size_of, each)) / len(each) for each in rows]
        weights = [_divided(weight, size) for weight, size in zip(weights, sizes, strict=True)]
    digests, epochs = [dataset.digest for dataset in datasets], section.num_epochs
    return Stream(rows, weights, seed=section.seed, shuffle=data.shuffle, max_num_epochs=epochs, digests=digests)


def _divided(weight: Weight, size: float) -> Weight:
    """Return the weight of rows that has the given share of their tokens."""
    return weight / size if isinstance(weight, float) else [(step, each / size) for step, each in weight]


def longest_row(data: DataConfig, policy: ModelConfig) -> int:
    """Return the maximum number of tokens of a row."""
    limit = policy.max_total_sequence_length
    return min(data.max_input_seq_length or limit, limit)


def row_limit(data: DataConfig, policy: ModelConfig) -> tuple[int, str]:
    """Return `longest_row`, and the key that sets it."""
    limit = longest_row(data, policy)
    is_own = data.max_input_seq_length is not None
    return limit, "data.max_input_seq_length" if is_own else "policy.max_total_sequence_length"
