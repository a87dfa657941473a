"""`rl data show`: rows of a config or of a file, as an algorithm reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rl_algos.data.config import DataConfig, Purpose
from rl_algos.data.contamination import Overlap, overlaps
from rl_algos.data.examples import OpenDataset, open_datasets
from rl_algos.data.pass_rates import pass_rates, reason_to_leave_out
from rl_algos.data.preview import Refusal, RowReader, Text
from rl_algos.data.rows.example import WRITTEN, Example, info_of
from rl_algos.data.sources.hub_datasets import DATASETS as ON_HUB
from rl_algos.data.sources.hub_datasets import PREFERENCES
from rl_algos.evaluation.tasks import task_of
from rl_core.algorithm import Algorithm, implementation_of
from rl_core.config import assemble, did_you_mean, load, resolve
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import ALGORITHMS, DATASETS, algorithm_named, names
from rl_core.rollouts.rollout import Message
from rl_launch.commands.explain import names_config
from rl_launch.model_files.local_models import MADE_HERE, TINY, untrained_model
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import read_plan
from rl_launch.run_config.root_types import type_of

MAX_READ = 1000
"""Maximum number of rows of a dataset that the summary counts by default."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_RESPONSES = ("chosen", "rejected", "completions")
_VERDICTS = ("label", "score")


@dataclass(frozen=True)
class GivenRows:
    """The rows that the user named, and how they are read.

    Args:
        config: Resolved root.
        is_run: True if they are from a run's config, which decides whether a refused row ends the run.
        purpose: Whether they are training or validation rows.
        datasets: Their datasets.
        reader: Reader of the algorithm.
        tokenizer: Tokenizer of the model; None if no model is named.
        rates: Pass rates of the prompts, by the name of each dataset that selects by them.
    """

    config: Any
    is_run: bool
    purpose: Purpose
    datasets: Sequence[OpenDataset]
    reader: RowReader
    tokenizer: Any
    rates: Mapping[str, Mapping[bytes, float]]


@dataclass(frozen=True)
class ShownRow:
    """A row and its use.

    Args:
        number: Number of the row in its dataset, from 1.
        place: Place of the row, such as `prompts.jsonl, line 3`.
        columns: Columns as the file has them; None if they cannot be read.
        example: The conversation with its answer or responses; None if the row is malformed.
        texts: Strings that the model reads; empty without a tokenizer, or if there are none.
        too_long: By string, whether it has more tokens than allowed.
        refusal: Why the row is not used; None if it is, apart from its length.
        environment: Name of the environment that scores it; empty if none does.
        fields: Fields that the environment may ask for.
    """

    number: int
    place: str
    columns: Mapping[str, Any] | None
    example: Example | None
    texts: Sequence[Text]
    too_long: Sequence[bool]
    refusal: Refusal | None
    environment: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Counts:
    """Numbers of the first rows of a dataset.

    Args:
        num_read: Number of rows counted.
        lengths: Tokens of the strings of rows that are not refused, in increasing order; empty without a tokenizer.
        num_learned: Number of tokens among them that the loss applies to.
        num_too_long: Number of rows with a string that is too long.
        refusals: Number of rows by the reason for which they are not used, the most frequent first.
        num_ending: Number of rows that end a run of this config.
    """

    num_read: int
    lengths: Sequence[int]
    num_learned: int
    num_too_long: int
    refusals: Mapping[str, int]
    num_ending: int


def given_rows(
    source: str, overrides: Sequence[str] = (), *, model: str = "", algorithm: str = "", validation: bool = False
) -> GivenRows:
    """Open the rows of a command line.

    Args:
        source: A recipe, a YAML file or a run directory; or a file, a pattern or a folder of data, or the name of a
            dataset.
        overrides: `KEY=VALUE` of the config.
        model: Model whose tokenizer and chat template replace those in the config.
        algorithm: Algorithm that reads a file; decided by the columns if empty.
        validation: True for the rows of validation.

    Raises:
        ConfigError: If the source, the model or a key does not exist, or the rows of the algorithm cannot be shown.
        DataError: If the rows cannot be read.
    """
    is_run = names_config(source)
    if is_run and algorithm:
        raise ConfigError(f"--algorithm is for data files; {source} has its own algorithm")
    changes = [*overrides, *([f"policy.model_name={model}"] if model else [])]
    config: Any = read_plan(source, changes).config if is_run else _config_of(source, changes, model, algorithm)
    _check_shown(config.algorithm)
    purpose: Purpose = "validation" if validation else "train"
    if validation and not config.data.validation_datasets:
        raise ConfigError("--validation: the config has no validation data. Set data.validation, or omit the flag")
    reader: RowReader = implementation_of(algorithm_named(config.algorithm)).row_reader(config)
    datasets = list(open_datasets(config.data, purpose, reader.processor, sample=MAX_READ))
    selecting = {each.name: each.settings.pass_rate for each in datasets if purpose == "train"}
    rates = {name: pass_rates(settings) for name, settings in selecting.items() if settings is not None}
    return GivenRows(config, is_run, purpose, datasets, reader, _tokenizer(config) if is_run or model else None, rates)


def shown_row(given: GivenRows, dataset: OpenDataset, number: int) -> ShownRow:
    """Read a row of a dataset.

    Args:
        given: How rows are read: reader, tokenizer and pass rates.
        dataset: Dataset with the row.
        number: Number of the row, from 1.
    """
    position = dataset.numbers[number - 1]
    place = dataset.rows.place(position)
    columns: Mapping[str, Any] | None = None
    try:
        columns = dataset.rows.rows[position]
        example = dataset.convert(columns)
    except DataError as error:
        return ShownRow(number, place, columns, None, (), (), Refusal(str(error)), "", {})
    reader, settings = given.reader, dataset.settings
    refusal = _refusal(given, dataset, example)
    texts: Sequence[Text] | Refusal = ()
    if given.tokenizer is not None:
        texts = reader.texts(given.tokenizer, example, settings)
    if isinstance(texts, Refusal):
        refusal, texts = refusal or texts, ()
    is_scored = reader.environment is not None
    too_long = [len(text.tokens) > reader.limit for text in texts]
    environment = settings.env_name or example.environment if is_scored else ""
    fields = info_of(example) if is_scored else {}
    return ShownRow(number, place, columns, example, texts, too_long, refusal, environment, fields)


def counts(given: GivenRows, dataset: OpenDataset, most: int = MAX_READ) -> Counts:
    """Count lengths and refusals over the first rows of a dataset.

    Args:
        given: How rows are read: reader, tokenizer and pass rates.
        dataset: Dataset to count.
        most: Maximum number of rows to count.
    """
    lengths: list[int] = []
    refusals = Counter[str]()
    num_learned = num_too_long = num_read = num_ending = 0
    for number in range(1, min(len(dataset.numbers), most) + 1):
        row = shown_row(given, dataset, number)
        num_read += 1
        num_ending += ends_run(given, row)
        if row.refusal is not None:
            refusals[row.refusal.reason] += 1
            continue
        lengths += [len(text.tokens) for text in row.texts]
        num_learned += sum(int(text.learned.sum()) for text in row.texts)
        num_too_long += any(row.too_long)
    return Counts(num_read, sorted(lengths), num_learned, num_too_long, dict(refusals.most_common()), num_ending)


def training_rows(config: Any) -> Iterator[OpenDataset]:
    """Return the training datasets of a resolved config, to read their rows as its algorithm does.

    Raises:
        ConfigError: If the rows of the algorithm cannot be read without a run.
        DataError: If a dataset cannot be read.
    """
    _check_shown(config.algorithm)
    reader: RowReader = implementation_of(algorithm_named(config.algorithm)).row_reader(config)
    return open_datasets(config.data, "train", reader.processor)


def contamination(given: GivenRows) -> dict[str, tuple[int, dict[str, Overlap]]]:
    """Return how many prompts the validation data and each task of a config have, and which of them its training rows
    contain, by their place.

    Raises:
        ConfigError: If the config has neither validation data nor tasks.
        DataError: If rows cannot be read.
    """
    config = given.config
    evaluation = getattr(config, "eval", None)
    listed = [] if evaluation is None else [task_of(each, evaluation, config.data) for each in evaluation.tasks]
    # Tasks are read as an evaluation reads them, whatever the rows of the algorithm are.
    opened = {
        each.name: open_datasets(DataConfig(train=each.dataset, validation=each.dataset), "validation")
        for each in listed
    }
    if config.data.validation_datasets:
        opened["validation"] = open_datasets(config.data, "validation", given.reader.processor)
    if not opened:
        raise ConfigError(
            "--contamination: the config has neither validation data nor tasks. Set data.validation or eval.tasks"
        )
    prompts: dict[str, dict[str, Sequence[Message]]] = {}
    for name, datasets in opened.items():
        prompts[name] = {}
        for dataset in datasets:
            for number in dataset.numbers:
                with suppress(DataError):
                    prompts[name][dataset.rows.place(number)] = dataset.convert(dataset.rows.rows[number]).prompt
    found = overlaps(prompts, training_rows(config))
    return {name: (len(prompts[name]), each) for name, each in found.items()}


def ends_run(given: GivenRows, row: ShownRow) -> bool:
    """Return whether a row ends a run of its config."""
    data = given.config.data
    if row.refusal is not None:
        return row.refusal.is_fault and data.malformed == "error"
    return any(row.too_long) and data.overlong == "error"


def _refusal(given: GivenRows, dataset: OpenDataset, example: Example) -> Refusal | None:
    """Return why a row is not used, whatever the tokenizer. A file that no run reads needs no environment."""
    settings = dataset.settings
    if settings.pass_rate is not None and dataset.name in given.rates:
        reason = reason_to_leave_out(settings.pass_rate, given.rates[dataset.name], example.prompt)
        if reason:
            return Refusal(reason, is_fault=False)
    is_scored = bool(settings.env_name or example.environment)
    if given.reader.environment is not None and not is_scored and not given.is_run:
        return None
    return given.reader.refusal(example, settings)


def _config_of(source: str, overrides: Sequence[str], model: str, algorithm: str) -> Any:
    """Return the config of a run with this data. All other keys have their defaults and are not checked."""
    values: dict[str, Any] = {"data": {"train": {_kind(source): source}}}
    if not algorithm:
        of_data = load(values, [each for each in overrides if each.startswith("data.")])
        algorithm = _algorithm_of(resolve(of_data, assemble("Root", {"data": DataConfig})).config)
    elif algorithm not in names(ALGORITHMS) and ":" not in algorithm:
        known = names(ALGORITHMS)
        raise ConfigError(f"--algorithm: got {algorithm!r}{did_you_mean(algorithm, known)}; known: {', '.join(known)}")
    _check_shown(algorithm)
    raw = load({"algorithm": algorithm, "policy": {"model_name": model or TINY}, **values}, overrides)
    return resolve(raw, type_of(raw, of_run=True)).config


def _check_shown(algorithm: str) -> None:
    """Refuse an algorithm whose rows cannot be shown.

    Raises:
        ConfigError: If it defines no `row_reader`.
    """
    plugin = algorithm_named(algorithm)
    if type(implementation_of(plugin)).row_reader is Algorithm.row_reader:
        if not plugin.trains:
            raise ConfigError(
                f"algorithm: {plugin.name} has no training rows to show. Name the recipe or run that it evaluates; "
                "leaks into its tasks are found by rl eval RUN --tasks TASK --contamination"
            )
        raise ConfigError(
            f"algorithm: rows of {plugin.name} cannot be shown, because it defines no `row_reader`. Use another "
            "algorithm"
        )


def _kind(source: str) -> str:
    """Return the key of a dataset that a source belongs to.

    Raises:
        ConfigError: If it can be neither a file nor a name.
    """
    known = [*names(DATASETS), *ON_HUB, *PREFERENCES]
    if Path(source).expanduser().exists() or "://" in source or any(mark in source for mark in "*?["):
        return "data_path"
    if source in known or (_HUB_NAME.fullmatch(source) and "." not in source.rpartition("/")[2]):
        return "dataset_name"
    near = did_you_mean(source, [*recipe_names(), *known])
    raise ConfigError(
        f"{source!r} is not a file, a recipe or a dataset{near}; use rl data list and rl recipes to list the names"
    )


def _algorithm_of(config: Any) -> str:
    """Return the algorithm that a file most likely is for, by the columns of its first row.

    Raises:
        DataError: If the file cannot be read.
    """
    for dataset in open_datasets(config.data, "train"):
        row: Mapping[str, Any] = {}
        for position in islice(dataset.numbers, MAX_READ):
            with suppress(DataError):
                row = dataset.rows.rows[position]
                break
        columns = {**row, **{name: row.get(own) for name, own in dataset.settings.columns.items()}}
        if any(name in columns for name in _RESPONSES):
            return "dpo"
        if "completion" in columns and any(name in columns for name in _VERDICTS):
            return "dpo"
        try:
            example = dataset.convert(row)
        except DataError:
            continue
        if example.has_response or example.solution is not None or {*WRITTEN} & {*example.columns, *columns}:
            return "sft"
    return "grpo"


def _tokenizer(config: Any) -> Any:
    """Return the tokenizer of the policy. A model that is warmed up here has the tokenizer of the untrained one."""
    # imports transformers, which takes a second
    from rl_algos.tokenizer import load_tokenizer, require_chat_template

    settings, model = config.policy.tokenizer, config.policy.model_name
    if settings.name in MADE_HERE:
        settings = settings.model_copy(update={"name": str(untrained_model(settings.name))})
    folder = str(untrained_model(model)) if model in MADE_HERE else str(Path(model).expanduser())
    tokenizer = load_tokenizer(settings, folder, config.policy.vision)
    require_chat_template(tokenizer)
    return tokenizer
