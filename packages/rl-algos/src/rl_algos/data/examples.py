"""Datasets as examples with stable ids."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np

from rl_algos.data import cache, encoding
from rl_algos.data.config import DataConfig, DataRoot, DatasetConfig, OnFault, Purpose, dataset_names
from rl_algos.data.encoding import Failure, encode_in_memory, encode_on_disk
from rl_algos.data.example import Example, Processor, by_keys, column
from rl_algos.data.faults import LeftOut
from rl_algos.data.files import Rows
from rl_algos.data.hub_datasets import with_known
from rl_algos.data.lazily import Lazily, RowMapping
from rl_algos.data.load import load_rows, stream_rows
from rl_algos.data.messages import refuse_surrogates
from rl_algos.data.pass_rates import positions_within
from rl_algos.data.permutation import permutation
from rl_algos.data.preference import preference
from rl_algos.data.processors import arranged, check_streamable, processor
from rl_algos.data.row_digest import RowDigest
from rl_algos.data.row_images import RowImages, images_column
from rl_algos.data.template import Surround
from rl_core.errors import DataError
from rl_core.images import image_refs
from rl_core.rollouts.rollout import Message

_log = logging.getLogger(__name__)

_READ = ("messages", "info", "environment")
"""Columns that are not fields of an example's `info`: they are part of the example itself."""

NO_ENVIRONMENT = (
    "the row names no environment to score it; set `env_name` of its dataset or data.default.env_name, to a reward of "
    "your own (file.py:function) or an installed environment"
)
"""Message about a row that needs an environment."""

T = TypeVar("T")


SAMPLE = 4
"""Rows of a dataset with `streaming` that are read before a run starts."""


@dataclass(frozen=True)
class Source:
    """Rows that are read as they come.

    Args:
        open_rows: Function from a number of rows to skip to the remaining rows.
        convert: Function from a row to an example; raises a `DataError` for a row of another form.
    """

    open_rows: Callable[[int], Iterator[Mapping[str, Any]]]
    convert: Callable[[Mapping[str, Any]], Example]


@dataclass(frozen=True)
class Dataset:
    """Examples of one dataset.

    Args:
        name: Unique among the run's datasets of the same purpose.
        examples: by id, `name:split:row`, in the order of the rows; `row` counts from 0. Those of a large dataset are
            made of their rows whenever they are asked for.
        settings: Settings as configured.
        place_of: Function from the number of a row to where it is, as `rl_algos.data.files.Rows` has it.
        named: The environments that rows name, each with the id of the first row that does; that of none is empty.
        default_environment: Scores rows that name none; empty if there is none.
        malformed: Whether a row that cannot be used ends the run, or is left out and counted.
        source: Source of a dataset with `streaming`, all its rows; `examples` are then a sample.
        digest: Changes with the contents of the rows, images and prompt files that examples are made of.
        unanswered: Positions of the examples that have a solution and no answer that can be compared, as proofs have.
    """

    name: str
    examples: RowMapping[Example]
    settings: DatasetConfig
    place_of: Callable[[int], str]
    named: Mapping[str, str]
    default_environment: str = ""
    malformed: OnFault = "error"
    digest: str = ""
    unanswered: Sequence[int] = ()
    source: Source | None = None

    def place(self, row_id: str) -> str:
        """The place of a row, for messages: `prompts.jsonl, line 3`."""
        return self.place_of(int(row_id.rpartition(":")[2]))

    def environment(self, row_id: str) -> str:
        """The environment that scores a row's completions; raises a `DataError` if none is named."""
        return self.environment_of(self.examples[row_id], row_id)

    def environment_of(self, example: Example, row_id: str) -> str:
        """Return the environment of a row whose example is given; see `environment`."""
        return self._environment(self.settings.env_name or example.environment, row_id)

    def environments(self) -> dict[str, str]:
        """The environments that score the rows, each with the id of the first; raises a `DataError` if a row names
        none."""
        if self.settings.env_name:
            return {self.settings.env_name: next(iter(self.examples))}
        return {self._environment(name, row_id): row_id for name, row_id in self.named.items()}

    def answered(self) -> Dataset:
        """The dataset without `unanswered`; raises a `DataError` if nothing is left."""
        if not self.unanswered or self.source is not None:  # rows that are read as they come are left out then
            return self
        num, total = len(self.unanswered), len(self.examples)
        what = f"{self.name}: {num} of {total} rows have a solution, but no answer that can be compared"
        if num == total:
            raise DataError(f"{what}; set `output_key` to the column of the answer, or choose another dataset")
        _log.warning("%s; these rows are excluded", what)
        return self.select(np.delete(np.arange(total), self.unanswered))

    def within_pass_rates(self) -> Dataset:
        """The dataset without the rows that its `pass_rate` leaves out; raises a `DataError` if nothing is left."""
        if self.settings.pass_rate is None:
            return self
        prompts = (example.prompt for example in self.examples.values_in_order)
        return self.select(positions_within(self.settings.pass_rate, self.name, prompts))

    def select(self, positions: np.ndarray) -> Dataset:
        """Return the dataset with only the examples at these positions, ascending."""
        unanswered = np.flatnonzero(np.isin(positions, self.unanswered)).tolist()
        digest = cache.digest(self.digest, np.asarray(positions, dtype=np.int64).tobytes())
        return replace(self, examples=self.examples.select(positions), unanswered=unanswered, digest=digest)

    def _environment(self, named: str, row_id: str) -> str:
        name = named or self.default_environment
        if not name:
            raise DataError(f"{self.place(row_id)}: {NO_ENVIRONMENT}")
        return name

    def log_unused_columns(self) -> None:
        """Log once which columns of the first row nothing is read from, for data that no reward is given."""
        example = next(iter(self.examples.values_in_order), None)
        if example is None or not example.columns or self.settings.prompt_file is not None:
            return
        used = {*example.columns, *images_column(example.info, self.settings.images_key)[:1]}
        if unused := sorted(example.info.keys() - used):
            _log.info("%s: not used: the columns %s", self.name, ", ".join(unused))

    def conversations(self) -> Iterator[tuple[str, Sequence[Message]]]:
        """The place and the messages of each row, in order."""
        return ((self.place(row_id), example.messages) for row_id, example in self.examples.items())

    def encode(self, encode: Callable[[Example], T], num_workers: int) -> RowMapping[T]:
        """Every example encoded, by id; in processes of their own if `num_workers` is above 0.

        Args:
            encode: Raises a `DataError` for an example that it refuses; picklable if there are workers or many rows.
            num_workers: Number of processes; 0 to encode in this process.

        Raises:
            DataError: Naming the row that cannot be encoded, if `malformed` is `error`, or the first if no row is left.
        """
        examples = self.examples.values_in_order
        encoded = self.examples.with_values(
            encode_in_memory(examples, encode, num_workers)
            if len(examples) < encoding.LARGE
            else encode_on_disk(examples, encode, num_workers, name=self.name)
        )
        faults = LeftOut(self.name, self.malformed, len(encoded))

        def place(position: int) -> str:
            return self.place(encoded.row_id(position))

        bad = array("q")
        for position, value in enumerate(encoded.values_in_order):
            if faults.found(value, partial(place, position)):
                bad.append(position)
        faults.report()
        kept = encoded.select(np.delete(np.arange(len(encoded)), bad)) if bad else encoded
        return cast("RowMapping[T]", kept)

    def within_limit(
        self, rows: RowMapping[T], lengths: Iterable[int], limit: int, *, overlong: OnFault
    ) -> RowMapping[T]:
        """The encoded rows of at most `limit` tokens.

        Raises:
            DataError: Naming the longest row, if some are longer and `overlong` is `error`, or if none is left.
        """
        sizes = np.fromiter(lengths, dtype=np.int64, count=len(rows))
        num_over = int((sizes > limit).sum())
        if not num_over:
            return rows
        longest = int(sizes.argmax())
        what = (
            f"{num_over} of {len(rows)} rows have more than {limit} tokens; the longest "
            f"({self.place(rows.row_id(longest))}) has {sizes[longest]}"
        )
        if overlong == "error":
            raise DataError(
                f"{what}; increase data.max_input_seq_length (and policy.max_total_sequence_length, which limits it), "
                "or set data.overlong: skip to exclude them"
            )
        if num_over == len(rows):
            raise DataError(
                f"{what}, so no rows remain; increase data.max_input_seq_length and policy.max_total_sequence_length"
            )
        _log.warning("%s; they are excluded (data.overlong: skip)", what)
        return rows.select(np.flatnonzero(sizes <= limit))


@dataclass(frozen=True)
class Datasets:
    """The data of a run before it is tokenised; `validation` is empty if there is none."""

    train: list[Dataset]
    validation: list[Dataset]


RowCheck = Callable[[Example, DatasetConfig], None]
"""Raises a `DataError` for an example that cannot be used, by the settings of its dataset."""


def load_examples(config: DataRoot, default: Processor = by_keys, check: RowCheck | None = None) -> Datasets:
    """Load all data that the `data` section of a root names, for an algorithm plugin's `load`; see
    `load_datasets`."""
    return Datasets(
        load_datasets(config.data, "train", default, check), load_datasets(config.data, "validation", default, check)
    )


def load_datasets(
    config: DataConfig, purpose: Purpose, default: Processor = by_keys, check: RowCheck | None = None
) -> list[Dataset]:
    """The configured datasets for training or validation; ids are unique and depend on no row's content.

    Args:
        config: Config section `data`.
        purpose: `train` or `validation`, which is also the split of datasets that name none.
        default: Processor of datasets that name none.
        check: Called for every row; None to accept all.

    Raises:
        DataError: Naming dataset and row, and the remedy.
        ConfigError: If a file or a processor that a dataset names does not exist.
    """
    settings = config.train_datasets if purpose == "train" else config.validation_datasets
    # one after another, so that the rows of only one are read while its examples are made
    datasets = [
        _dataset(_opened(name, one, config, purpose, default, check, SAMPLE), one.split or purpose, config.malformed)
        for name, one in zip(dataset_names(settings, purpose), settings, strict=True)
    ]
    return [dataset.within_pass_rates() for dataset in datasets] if purpose == "train" else datasets


@dataclass(frozen=True)
class OpenDataset:
    """Rows of one dataset before they become examples.

    Args:
        name: Name, unique among the run's datasets of the same purpose.
        settings: As configured, completed by what is known of datasets on the hub.
        rows: All rows that can be read; a sample of a dataset with `streaming`.
        numbers: Numbers of the rows of this purpose, ascending; others are held out for the other one.
        convert: From a row to an example; raises a `DataError` for a row of another form.
        source: All rows of a dataset with `streaming`; None for others.
    """

    name: str
    settings: DatasetConfig
    rows: Rows
    numbers: Sequence[int]
    convert: Callable[[Mapping[str, Any]], Example]
    source: Source | None = None


def open_datasets(
    config: DataConfig,
    purpose: Purpose,
    default: Processor = by_keys,
    check: RowCheck | None = None,
    *,
    sample: int = SAMPLE,
) -> list[OpenDataset]:
    """Open the configured datasets for training or validation without converting their rows.

    Args:
        config: Config section `data`.
        purpose: `train` or `validation`, which is also the split of datasets that name none.
        default: Processor of datasets that name none.
        check: Called for every row that is converted; None to accept all.
        sample: Number of rows to read of a dataset with `streaming`.

    Raises:
        DataError: If a dataset cannot be read.
        ConfigError: If a file or a processor that a dataset names does not exist.
    """
    settings = config.train_datasets if purpose == "train" else config.validation_datasets
    named = zip(dataset_names(settings, purpose), settings, strict=True)
    return [_opened(name, one, config, purpose, default, check, sample) for name, one in named]


def _opened(
    name: str,
    settings: DatasetConfig,
    config: DataConfig,
    purpose: Purpose,
    default: Processor,
    check: RowCheck | None,
    sample: int,
) -> OpenDataset:
    source: Purpose = "train" if settings.split_validation_size is not None else purpose
    settings = with_known(settings, source, of_preferences=default is preference)
    images = RowImages.of(settings, allow_urls=config.allow_image_urls)
    convert = _Convert(processor(settings, default), Surround.of(settings), images, settings, check)
    streamed = None
    if settings.streaming and purpose == "train":
        check_streamable(settings)
        streamed = Source(stream_rows(settings, source), convert)
        rows = Rows.named(
            list(islice(streamed.open_rows(0), sample)), f"{settings.source} ({settings.split or source})"
        )
    else:
        rows = arranged(load_rows(settings, source), settings)
    return OpenDataset(name, settings, rows, _rows_for(purpose, settings, len(rows)), convert, streamed)


def _dataset(opened: OpenDataset, split: str, malformed: OnFault) -> Dataset:
    """The examples of a dataset; see `Dataset` for the arguments."""
    name, rows, chosen, convert = opened.name, opened.rows, opened.numbers, opened.convert
    is_held = len(chosen) < encoding.LARGE
    faults = LeftOut(name, malformed, len(chosen))
    contents = RowDigest()
    if texts := Surround.of(opened.settings).texts:
        contents.add(texts)
    numbers, unanswered, held = array("q"), array("q"), []
    named: dict[str, int] = {}
    for number, example in zip(chosen, _converted(rows, chosen, convert, contents), strict=True):
        if faults.found(example, partial(rows.place, number)):
            continue
        assert isinstance(example, Example)
        named.setdefault(example.environment, number)
        if example.is_unanswered:
            unanswered.append(len(numbers))
        numbers.append(number)
        if is_held:
            held.append(example)
    faults.report()
    prefix = f"{name}:{split}"
    examples = RowMapping(
        prefix,
        numbers,
        held if is_held else Lazily(len(numbers), lambda index: convert(rows[numbers[index]])),
    )
    first = {environment: f"{prefix}:{number}" for environment, number in named.items()}
    return Dataset(
        name,
        examples,
        opened.settings,
        rows.place,
        first,
        malformed=malformed,
        digest=contents.hexdigest(),
        unanswered=unanswered,
        source=opened.source,
    )


def _rows_for(purpose: Purpose, settings: DatasetConfig, num_rows: int) -> Sequence[int]:
    """The numbers of the rows to train on, or to validate on, if some are held out; otherwise all."""
    size = settings.split_validation_size
    if size is None:
        return range(num_rows)
    num_held_out = max(1, round(size * num_rows)) if size < 1 else int(size)
    if num_held_out >= num_rows:
        raise DataError(
            f"split_validation_size of the dataset {settings.source!r} holds {num_held_out} of {num_rows} rows out of "
            "training, so none remain. Lower it"
        )
    order = permutation(num_rows, num_rows)
    chosen: list[int] = np.sort(order[:num_held_out] if purpose == "validation" else order[num_held_out:]).tolist()
    return array("q", chosen)


def _converted(
    rows: Rows, chosen: Sequence[int], convert: Callable[[Mapping[str, Any]], Example], contents: RowDigest
) -> Iterator[Example | Failure]:
    for index in chosen:
        try:
            row = rows.rows[index]
            contents.add(row)
            example = convert(row)
            conversations = [example.messages, *(response.messages for response in example.responses)]
            if images := [ref.digest for each in conversations for ref in image_refs(each)]:
                contents.add(images)  # the row may hold their paths only
            yield example
        except DataError as error:
            yield Failure(str(error))


@dataclass(frozen=True)
class _Convert:
    processor: Processor
    surround: Surround
    images: RowImages
    settings: DatasetConfig
    check: RowCheck | None

    def __call__(self, row: Mapping[str, Any]) -> Example:
        row = _renamed(row, self.settings.columns)
        refuse_surrogates(row)
        example = self.surround.apply(self.processor(row, self.settings), row)
        example, row = self.images.place(example, row)
        # a reward asks for any field of the row by name
        fields = {name: value for name, value in row.items() if name not in _READ}
        example = replace(example, info={**fields, **example.info})
        if self.check is not None:
            self.check(example, self.settings)
        return example


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with columns under further names, each given with the column that it stands for."""
    return {**row, **{name: column(row, own) for name, own in columns.items()}} if columns else row
