"""Rows that an algorithm trains and validates on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import Dataset, Datasets
from rl_algos.data.prompts import weights_of
from rl_algos.data.stream import Stream
from rl_algos.supervised.config import SupervisedConfig
from rl_core.model_config import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class SupervisedData(Generic[T]):
    """Data to train and validate on.

    Args:
        train: training rows in their order.
        validation: batches of rows by the name of their dataset; empty if there is no validation.
    """

    train: Stream[T]
    validation: Mapping[str, Sequence[Sequence[T]]]


def supervised_data(
    section: SupervisedConfig,
    data: DataConfig,
    policy: ModelConfig,
    datasets: Datasets,
    rows_of: Callable[[Dataset], Sequence[T]],
    size_of: Callable[[T], float] | None = None,
) -> SupervisedData[T]:
    """The rows of all datasets, mixed as configured for training and in batches for validation.

    Args:
        section: the algorithm's own.
        rows_of: from a dataset to its rows.
        size_of: from a row to its share when datasets are mixed by weight; None if all rows count alike.
    """
    rows = [rows_of(dataset) for dataset in datasets.train]
    weights = weights_of(datasets.train)
    if weights is not None and size_of is not None:
        sizes = [sum(map(size_of, each)) / len(each) for each in rows]
        weights = [weight / size for weight, size in zip(weights, sizes, strict=True)]
    stream = Stream(
        rows,
        weights,
        seed=section.seed,
        shuffle=data.shuffle,
        max_num_epochs=section.num_epochs,
    )
    held_out: dict[str, list[T]] = {}
    for dataset in datasets.validation:
        held_out.setdefault(dataset.name, []).extend(rows_of(dataset))
    size = section.val_global_batch_size or policy.train_global_batch_size
    batches = {name: _batches(found, size)[: section.val_batches] for name, found in held_out.items()}
    return SupervisedData(stream, batches)


def longest_row(data: DataConfig, policy: ModelConfig) -> int:
    """Most tokens of a row."""
    limit = policy.max_total_sequence_length
    return min(data.max_input_seq_length or limit, limit)


def _batches(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
