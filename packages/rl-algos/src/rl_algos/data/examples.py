"""Datasets as examples with stable ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

from jinja2 import TemplateError

from rl_algos.data.config import DataConfig, DataRoot, DatasetConfig, Purpose, dataset_names
from rl_algos.data.example import Example, Processor, by_keys, column
from rl_algos.data.load import load_rows
from rl_algos.data.processors import processor
from rl_algos.data.template import Surround
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

_READ = ("messages", "info", "environment")
"""Columns that are not fields of an example's `info`: they are part of the example itself."""

T = TypeVar("T")


@dataclass(frozen=True)
class Dataset:
    """Examples of one dataset.

    Args:
        name: unique among the run's datasets of the same purpose.
        examples: by id, `name:split:row`, in the order of the rows; `row` counts from 0.
        settings: as configured.
        place_of: from the number of a row to where it is, as `rl_algos.data.load.Rows` has it.
    """

    name: str
    examples: Mapping[str, Example]
    settings: DatasetConfig
    place_of: Callable[[int], str]

    def place(self, row_id: str) -> str:
        """The place of a row, for messages: `prompts.jsonl, line 3`."""
        return self.place_of(int(row_id.rpartition(":")[2]))

    def environment(self, row_id: str) -> str:
        """The environment that scores a row's completions; raises a `DataError` if none is named."""
        name = self.settings.env_name or self.examples[row_id].environment
        if not name:
            raise DataError(
                f"{self.place(row_id)}: the row names no environment to score it; set `env_name` of its dataset or "
                "data.default.env_name, to a reward of your own (file.py:function) or an installed environment"
            )
        return name

    def encode(self, encode: Callable[[Example], T], num_workers: int) -> dict[str, T]:
        """Every example encoded, by id; in processes of their own if `num_workers` is above 0.

        Args:
            encode: picklable if there are workers.

        Raises:
            DataError: naming the row that cannot be encoded.
        """
        task = _Encode(encode)
        items = ((self.place(row_id), example) for row_id, example in self.examples.items())
        if not num_workers:
            return dict(zip(self.examples, map(task, items), strict=True))
        with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
            return dict(zip(self.examples, pool.map(task, items, chunksize=256), strict=True))

    def within_limit(
        self, rows: Mapping[str, T], lengths: Sequence[int], limit: int, *, overlong: Literal["error", "skip"]
    ) -> dict[str, T]:
        """The encoded rows of at most `limit` tokens.

        Raises:
            DataError: naming the longest row, if some are longer and `overlong` is `error`, or if none is left.
        """
        over = {row_id: length for row_id, length in zip(rows, lengths, strict=True) if length > limit}
        if not over:
            return dict(rows)
        longest = max(over, key=over.__getitem__)
        what = (
            f"{len(over)} of {len(rows)} rows have more than {limit} tokens; the longest ({self.place(longest)}) has "
            f"{over[longest]}"
        )
        if overlong == "error":
            raise DataError(
                f"{what}; raise data.max_input_seq_length (and policy.max_total_sequence_length, which bounds it), "
                "or set data.overlong: skip to leave them out"
            )
        if len(over) == len(rows):
            raise DataError(
                f"{what}, so that no row is left; raise data.max_input_seq_length and policy.max_total_sequence_length"
            )
        _log.warning("%s; left out (data.overlong: skip)", what)
        return {row_id: row for row_id, row in rows.items() if row_id not in over}


@dataclass(frozen=True)
class Datasets:
    """The data of a run before it is tokenised; `validation` is empty if there is none."""

    train: list[Dataset]
    validation: list[Dataset]


def load(config: DataRoot, default: Processor = by_keys) -> Datasets:
    """Load all data that the `data` section of a root names, for an algorithm plugin's `load`; raises as
    `load_datasets`."""
    return Datasets(load_datasets(config.data, "train", default), load_datasets(config.data, "validation", default))


def load_datasets(config: DataConfig, purpose: Purpose, default: Processor = by_keys) -> list[Dataset]:
    """The configured datasets for training or validation; ids are unique and depend on no row's content.

    Args:
        default: processor of datasets that name none.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: if a file or a processor that a dataset names does not exist.
    """
    settings = config.train_datasets if purpose == "train" else config.validation_datasets
    named = zip(dataset_names(settings, purpose), settings, strict=True)
    return [_dataset(name, one, purpose, default) for name, one in named]


@dataclass(frozen=True)
class _Encode:
    """Encodes one item; an error names the item's place."""

    encode: Callable[[Any], Any]

    def __call__(self, entry: tuple[str, Any]) -> Any:
        place, item = entry
        try:
            return self.encode(item)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        except TemplateError as error:
            raise DataError(f"{place}: the chat template refuses it: {error}") from None


def _dataset(name: str, settings: DatasetConfig, purpose: Purpose, default: Processor) -> Dataset:
    convert = _Encode(_Convert(processor(settings, default), Surround.of(settings), settings))
    split = settings.split or purpose
    rows = load_rows(settings, purpose)
    examples = {f"{name}:{split}:{index}": convert((rows.place(index), row)) for index, row in enumerate(rows)}
    return Dataset(name, examples, settings, rows.place)


@dataclass(frozen=True)
class _Convert:
    processor: Processor
    surround: Surround
    settings: DatasetConfig

    def __call__(self, row: Mapping[str, Any]) -> Example:
        row = _renamed(row, self.settings.columns)
        example = self.surround.apply(self.processor(row, self.settings), row)
        # a reward asks for any field of the row by name
        fields = {name: value for name, value in row.items() if name not in _READ}
        return replace(example, info={**fields, **example.info})


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with columns under further names, each given with the column that it stands for."""
    return {**row, **{name: column(row, own) for name, own in columns.items()}} if columns else row
