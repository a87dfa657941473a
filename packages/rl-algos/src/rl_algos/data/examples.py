"""Datasets as examples with stable ids."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from rl_algos.data import encoding
from rl_algos.data.config import DataConfig, DataRoot, DatasetConfig, OnFault, Purpose, dataset_names
from rl_algos.data.encoding import EncodingFailure, LeftOut, encode_in_memory, encode_on_disk
from rl_algos.data.pass_rates import positions_within
from rl_algos.data.processors import arranged, check_streamable, processor
from rl_algos.data.row_images import RowImages
from rl_algos.data.rows.example import Example, Processor, by_keys, column, images_column
from rl_algos.data.rows.lazily import Lazily, RowMapping
from rl_algos.data.rows.messages import refuse_surrogates
from rl_algos.data.rows.preference import preference
from rl_algos.data.rows.template import Surround
from rl_algos.data.sources import cache
from rl_algos.data.sources.files import DataRows
from rl_algos.data.sources.hub_datasets import with_known
from rl_algos.data.sources.load import load_rows, stream_rows
from rl_algos.data.stream import permutation
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


class RowDigest:
    """Digest of rows in their order, added one by one as they are read.

    It depends on values only, not on the file, hub or plugin of the rows: rows that move to another file, or to another
    format that holds the same values, have the same digest. It takes far less time than tokenising the rows does.

    Attributes:
        hexdigest: Returns the digest of the rows so far.
    """

    def __init__(self) -> None:
        self._whole = blake2b(digest_size=16)
        self.hexdigest = self._whole.hexdigest

    def add(self, row: Any) -> None:
        """Add the next row."""
        self._whole.update(json.dumps(row, default=_as_json, skipkeys=True).encode())


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):  # This may be an image.
        return blake2b(value, digest_size=16).hexdigest()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    # The text of any other object may hold its address.
    return str(value) if type(value).__module__ in ("datetime", "decimal", "uuid") else type(value).__qualname__


class Source(NamedTuple):
    """Rows that are read as they come.

    Attributes:
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
        examples: by id, `name:split:row`, in the order of the rows; `row` counts from 0. Examples of a large dataset
            are made of their rows whenever they are asked for.
        settings: Settings as configured.
        place_of: Function from the number of a row to where it is; see `rl_algos.data.sources.files.DataRows`.
        named: The environments of the rows, each with the id of its first row; empty if a row has none.
        default_environment: Scores rows without an environment; empty if there is none.
        malformed: `error` if a row that cannot be used ends the run, `skip` to leave it out and count it.
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
        """Return the place of a row, for messages: `prompts.jsonl, line 3`."""
        return self.place_of(int(row_id.rpartition(":")[2]))

    def environment(self, row_id: str) -> str:
        """Return the environment that scores a row's completions; raise a `DataError` if there is none."""
        return self.environment_of(self.examples[row_id], row_id)

    def environment_of(self, example: Example, row_id: str) -> str:
        """Return the environment of a row whose example is given; see `environment`."""
        return self._environment(self.settings.env_name or example.environment, row_id)

    def environments(self) -> dict[str, str]:
        """Return the environments that score the rows, each with the id of the first; raise a `DataError` if a row has
        none."""
        if self.settings.env_name:
            return {self.settings.env_name: next(iter(self.examples))}
        return {self._environment(name, row_id): row_id for name, row_id in self.named.items()}

    def answered(self) -> Dataset:
        """Return the dataset without `unanswered`; raise a `DataError` if nothing is left."""
        if not self.unanswered or self.source is not None:  # Streamed rows are left out when they are read.
            return self
        num, total = len(self.unanswered), len(self.examples)
        found = f"{self.name}: {num} of {total} rows have a solution, but no answer that can be compared"
        if num == total:
            raise DataError(f"{found}; set `output_key` to the column of the answer, or choose another dataset")
        _log.warning("%s; these rows are excluded", found)
        return self.select(np.delete(np.arange(total), self.unanswered))

    def within_pass_rates(self) -> Dataset:
        """Return the dataset without the rows that its `pass_rate` leaves out; raise a `DataError` if nothing is
        left."""
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
        """Return the place and the messages of each row, in order."""
        return ((self.place(row_id), example.messages) for row_id, example in self.examples.items())

    def encode(self, encode: Callable[[Example], T], num_workers: int) -> RowMapping[T]:
        """Encode every example, by id; in separate processes if `num_workers` is above 0.

        Args:
            encode: Raises a `DataError` for an example that it refuses; picklable if there are workers or many rows.
            num_workers: Number of processes; 0 to encode in this process.

        Raises:
            DataError: With the row that cannot be encoded, if `malformed` is `error`, or the first if no row is left.
        """
        examples = self.examples.values_in_order
        values: Sequence[Any] = (
            encode_in_memory(examples, encode, num_workers)
            if len(examples) < encoding.LARGE
            else encode_on_disk(examples, encode, num_workers, name=self.name)
        )
        encoded = self.examples.with_values(values)
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
        """Return the encoded rows of at most `limit` tokens.

        Raises:
            DataError: With the longest row, if some are longer and `overlong` is `error`, or if none is left.
        """
        sizes = np.fromiter(lengths, dtype=np.int64, count=len(rows))
        num_over = int((sizes > limit).sum())
        if not num_over:
            return rows
        longest = int(sizes.argmax())
        found = (
            f"{num_over} of {len(rows)} rows have more than {limit} tokens; the longest "
            f"({self.place(rows.row_id(longest))}) has {sizes[longest]}"
        )
        if overlong == "error":
            raise DataError(
                f"{found}; increase data.max_input_seq_length (and policy.max_total_sequence_length, which limits it), "
                "or set data.overlong: skip to exclude them"
            )
        if num_over == len(rows):
            problem = f"{found}, so no rows remain"
            raise DataError(f"{problem}; increase data.max_input_seq_length and policy.max_total_sequence_length")
        _log.warning("%s; they are excluded (data.overlong: skip)", found)
        return rows.select(np.flatnonzero(sizes <= limit))


@dataclass(frozen=True)
class Datasets:
    """The data of a run before it is tokenised; `validation` is empty if there is none."""

    train: list[Dataset]
    validation: list[Dataset]


RowCheck = Callable[[Example, DatasetConfig], None]
"""Raises a `DataError` for an example that cannot be used, by the settings of its dataset."""


def load_examples(config: DataRoot, default: Processor = by_keys, check: RowCheck | None = None) -> Datasets:
    """Load all data of the `data` section of a root, for an algorithm plugin's `load`; see `load_datasets`."""
    return Datasets(
        load_datasets(config.data, "train", default, check), load_datasets(config.data, "validation", default, check)
    )


def load_datasets(
    config: DataConfig, purpose: Purpose, default: Processor = by_keys, check: RowCheck | None = None
) -> list[Dataset]:
    """Load the configured datasets for training or validation; ids are unique and depend on no row's content.

    Args:
        config: Config section `data`.
        purpose: `train` or `validation`, which is also the split of datasets without a split.
        default: Processor of datasets without a processor.
        check: Called for every row; None to accept all.

    Raises:
        DataError: With dataset and row, and the remedy.
        ConfigError: If a file or a processor of a dataset does not exist.
    """
    settings = config.train_datasets if purpose == "train" else config.validation_datasets
    # The datasets are opened one after another, so that the rows of only one are read while its examples are made.
    opened = zip(settings, open_datasets(config, purpose, default, check), strict=True)
    datasets = [_dataset(one, given.split or purpose, config.malformed) for given, one in opened]
    return [dataset.within_pass_rates() for dataset in datasets] if purpose == "train" else datasets


@dataclass(frozen=True)
class OpenDataset:
    """Rows of one dataset before they become examples.

    Args:
        name: Name, unique among the run's datasets of the same purpose.
        settings: Settings as configured, completed with the known settings of datasets on the hub.
        rows: All rows that can be read; a sample of a dataset with `streaming`.
        numbers: Numbers of the rows of this purpose, ascending; others are held out for the other one.
        convert: From a row to an example; raises a `DataError` for a row of another form.
        source: All rows of a dataset with `streaming`; None for others.
    """

    name: str
    settings: DatasetConfig
    rows: DataRows
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
) -> Iterator[OpenDataset]:
    """Open the configured datasets for training or validation, one after another, without converting their rows.

    Args:
        config: Config section `data`.
        purpose: `train` or `validation`, which is also the split of datasets without a split.
        default: Processor of datasets without a processor.
        check: Called for every row that is converted; None to accept all.
        sample: Number of rows to read of a dataset with `streaming`.

    Raises:
        DataError: If a dataset cannot be read.
        ConfigError: If a file or a processor of a dataset does not exist.
    """
    all_settings = config.train_datasets if purpose == "train" else config.validation_datasets
    for name, given in zip(dataset_names(all_settings, purpose), all_settings, strict=True):
        split: Purpose = "train" if given.split_validation_size is not None else purpose
        settings = with_known(given, split, of_preferences=default is preference)
        images = RowImages.of(settings, config)
        convert = _Convert(processor(settings, default), Surround.of(settings), images, settings, check)
        source = None
        if settings.streaming and purpose == "train":
            check_streamable(settings)
            source = Source(stream_rows(settings, split), convert)
            first = list(islice(source.open_rows(0), sample))
            rows = DataRows.named(first, f"{settings.source} ({settings.split or split})")
        else:
            rows = arranged(load_rows(settings, split), settings)
        numbers = _rows_for(purpose, settings, _matching(rows, settings))
        yield OpenDataset(name, settings, rows, numbers, convert, source)


def _dataset(opened: OpenDataset, split: str, malformed: OnFault) -> Dataset:
    """Make the examples of a dataset; see `Dataset` for the arguments."""
    name, rows, chosen, convert = opened.name, opened.rows, opened.numbers, opened.convert
    is_held = len(chosen) < encoding.LARGE
    faults = LeftOut(name, malformed, len(chosen))
    contents = RowDigest()
    if texts := Surround.of(opened.settings).texts:
        contents.add(texts)

    def converted(number: int) -> Example:
        row = rows.rows[number]
        contents.add(row)
        example = convert(row)
        conversations = [example.messages, *(response.messages for response in example.responses)]
        if images := [ref.digest for each in conversations for ref in image_refs(each)]:
            contents.add(images)  # The row may hold their paths only.
        return example

    numbers, unanswered, held = array("q"), array("q"), []
    named: dict[str, int] = {}
    for number in chosen:
        try:
            example: Example | EncodingFailure = converted(number)
        except DataError as error:
            example = EncodingFailure(str(error))
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
    values = held if is_held else Lazily(len(numbers), lambda index: convert(rows[numbers[index]]))
    return Dataset(
        name,
        RowMapping(prefix, numbers, values),
        opened.settings,
        rows.place,
        {environment: f"{prefix}:{number}" for environment, number in named.items()},
        malformed=malformed,
        digest=contents.hexdigest(),
        unanswered=unanswered,
        source=opened.source,
    )


def _matching(rows: DataRows, settings: DatasetConfig) -> Sequence[int]:
    """Return the numbers of the rows that `where` selects, with those that cannot be read, which are refused later."""
    if not settings.where:
        return range(len(rows))
    wanted = {
        name: {str(each) for each in (value if isinstance(value, list) else [value])}
        for name, value in settings.where.items()
    }
    numbers = array("q")
    there: dict[str, set[str]] = {name: set() for name in wanted}
    for number in range(len(rows)):
        try:
            row = rows.rows[number]
        except DataError:
            numbers.append(number)
            continue
        try:
            found = {name: str(column(row, name)) for name in wanted}
        except DataError as error:
            raise DataError(f"{rows.place(number)}: `where`: {error}") from None
        if all(found[name] in values for name, values in wanted.items()):
            numbers.append(number)
        elif not numbers:
            for name, value in found.items():
                there[name].add(value)
    if not numbers:
        shown = "; ".join(f"{name} is {', '.join(sorted(values)[:20])}" for name, values in there.items())
        raise DataError(f"no row of {settings.source!r} has the values of `where`, {settings.where}. There, {shown}")
    return numbers


def _rows_for(purpose: Purpose, settings: DatasetConfig, numbers: Sequence[int]) -> Sequence[int]:
    """Return the numbers of the rows to train on, or to validate on, if some are held out; otherwise all."""
    size, num_rows = settings.split_validation_size, len(numbers)
    if size is None:
        return numbers
    num_held_out = max(1, round(size * num_rows)) if size < 1 else int(size)
    if num_held_out >= num_rows:
        raise DataError(
            f"split_validation_size of the dataset {settings.source!r} holds {num_held_out} of {num_rows} rows out of "
            "training, so none remain. Lower it"
        )
    order = permutation(num_rows, num_rows)
    chosen = np.sort(order[:num_held_out] if purpose == "validation" else order[num_held_out:])
    return array("q", np.asarray(numbers, dtype=np.int64)[chosen].tolist())


@dataclass(frozen=True)
class _Convert:
    processor: Processor
    surround: Surround
    images: RowImages
    settings: DatasetConfig
    check: RowCheck | None

    def __call__(self, row: Mapping[str, Any]) -> Example:
        if renamed := self.settings.columns:
            row = {**row, **{name: column(row, own) for name, own in renamed.items()}}
        refuse_surrogates(row)
        example = self.surround.apply(self.processor(row, self.settings), row)
        example, row = self.images.place(example, row)
        # A reward asks for any field of the row by name.
        fields = {name: value for name, value in row.items() if name not in _READ}
        example = replace(example, info={**fields, **example.info})
        if self.check is not None:
            self.check(example, self.settings)
        return example
