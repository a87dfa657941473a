"""Settings of data: the source of rows, and how they become conversations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from rl_core.config import Config, PathText, Problem, ProblemError, WhenChanged

Purpose = Literal["train", "validation"]
"""The part of a run that rows are for."""

OnFault = Literal["error", "skip"]
"""What to do with a row that cannot be used: end the run, or exclude the row."""

Weight = float | Sequence[tuple[int, float]]
"""Weight of a dataset: a number, or numbers at steps, between which it changes linearly."""


class PassRateConfig(Config):
    """Selection of rows by the share of samples that an evaluation found right."""

    results: PathText
    """Folder that `rl eval` wrote when it evaluated these rows, with several samples per prompt. Prompts are matched as
    strings."""
    above: float | None = 0.0
    """Exclude rows with this pass rate or a lower one; null keeps them."""
    below: float | None = 1.0
    """Exclude rows with this pass rate or a higher one; null keeps them."""
    pass_threshold: float = 1.0
    """Minimum reward of a sample that passes."""

    @property
    def bounds(self) -> str:
        """The pass rates that are kept, in words."""
        words = (("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None) or "of any value"

    def keeps(self, rate: float) -> bool:
        """Return whether rows with this pass rate are kept; NaN is for rows that were not evaluated."""
        is_above = rate > (-math.inf if self.above is None else self.above)
        return is_above and rate < (math.inf if self.below is None else self.below)


class WeightPoint(Config):
    """Weight of a dataset at a step."""

    step: int = Field(gt=0)
    """Number of the step, counted from 1."""
    weight: float = Field(ge=0, allow_inf_nan=False)
    """Weight of the dataset at this step; with 0 it is not drawn."""


class DatasetConfig(Config):
    """A dataset: where its rows are, and how each becomes a prompt or a conversation."""

    dataset_name: str | None = None
    """Name of an installed dataset or of a dataset on the hub. Set either this or `data_path`."""
    data_path: PathText | None = None
    """Path of JSON Lines, Parquet, Arrow, JSON, CSV or TSV data: a file, a folder or a glob pattern, local or in an
    object store (`s3://bucket/folder`). Set either this or `dataset_name`."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    split: str | None = None
    """Split to read. If unset, `train` for training data and `validation` for validation data.

    For a folder: the files whose names start with it; all of them if unset.
    """
    where: dict[str, Any] = {}
    """Read only the rows whose columns have these values, or one of several: `{level: 5}`, `{year: [2023, 2024]}`.
    Values are compared as text."""
    streaming: bool = False
    """Stream a training dataset from the hub without downloading it, because it does not fit on the disk. Rows are
    shuffled within blocks of `shuffle_buffer`, and only steps limit the run."""
    shuffle_buffer: int = Field(default=10_000, gt=0)
    """Number of rows in a block that `streaming` shuffles; they are held in memory."""
    split_validation_size: Annotated[float | None, AfterValidator(lambda size: size or None)] = Field(
        default=None, ge=0
    )
    """Number of rows of a training dataset to hold out for validation, or their share if it is below 1. They are chosen
    at random, the same in every run, and are added to `data.validation`. With 0 none is held out."""
    pass_rate: PassRateConfig | None = None
    """Train only on rows that a model sometimes solves, according to the results of an evaluation."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of an installed dataset; `rl data list NAME` shows them."""
    input_key: str | None = None
    """Column with the input: a string or a list of messages. If unset, it is found by the columns of common formats:
    `messages`, `conversations` or `contents`, or else `prompt`, `query`, `question`, `instruction` (with `input`) or
    `input`. `reward_model.ground_truth` is a field of an object in a column."""
    output_key: str | None = None
    """Column with the answer. If unset, the column `answer` if there is one, and next to an input of text the column
    `completion`, `response` or `output`."""
    columns: dict[str, str] = {}
    """Columns whose names differ from those that a processor expects: the expected name to the name in the row, such as
    `{chosen: preferred, rejected: other}`."""
    weight: Annotated[float, Field(gt=0)] | list[WeightPoint] | None = None
    """Weight of the dataset when rows are drawn, relative to the other datasets. If unset for all of them, datasets are
    drawn in proportion to their rows.

    A list of weights at steps changes it during training: `[{step: 1, weight: 3}, {step: 200, weight: 1}]`. It is
    linear between these steps, and constant before the first and after the last."""
    images_key: str | None = None
    """Column with the images of a row: one or a list. They take the places of `<image>` in the text, and of parts
    `{type: image}` without an image, in order. If unset, the column `images`, or else `image`."""
    image_folder: PathText | None = None
    """Folder of the images that rows name by a path. If unset, the folder of `data_path`. Images outside it are
    refused."""
    env_name: str | None = None
    """Environment that scores completions: your own function (`file.py:function` or `package.module:function`), an
    installed environment, or one of `env`. If unset, the row gives its name."""
    prompt_file: PathText | None = None
    """Text file with a prompt template: `{input}` is replaced by the input, `{column}` by that column of the row."""
    system_prompt_file: PathText | None = None
    """Text file with a system message, which becomes the first message."""
    processor: str | None = None
    """Function that converts a row to a conversation: a built-in name (`math_problem`, `multiple_choice`, `gsm8k`,
    `squad`, `llava`, ..., and for preferences `preference`, `helpsteer3`, `ultrafeedback`), or your own function as
    `file.py:function` or `package.module:function`, which is called as `function(row, settings)` and returns an
    `Example`.

    If unset, a dataset that `rl data list` shows has its own processor. Otherwise `input_key` and `output_key` are
    used, and in preference learning `preference`.
    """

    @property
    def weight_by_step(self) -> Weight | None:
        """The weight as a stream takes it; None if it is not set."""
        if isinstance(self.weight, list):
            return [(point.step, point.weight) for point in self.weight]
        return self.weight

    @property
    def source(self) -> str:
        """The name or path of the dataset, as the user wrote it."""
        return self.dataset_name or self.data_path or ""


class DatasetDefaults(Config):
    """Settings that datasets share unless they set their own."""

    subset: str | None = None
    """`subset` of datasets that do not set it."""
    input_key: str | None = None
    """`input_key` of datasets that do not set it."""
    output_key: str | None = None
    """`output_key` of datasets that do not set it."""
    columns: dict[str, str] | None = None
    """`columns` of datasets that do not set it."""
    images_key: str | None = None
    """`images_key` of datasets that do not set it."""
    image_folder: PathText | None = None
    """`image_folder` of datasets that do not set it."""
    env_name: str | None = None
    """`env_name` of datasets that do not set it."""
    prompt_file: PathText | None = None
    """`prompt_file` of datasets that do not set it."""
    system_prompt_file: PathText | None = None
    """`system_prompt_file` of datasets that do not set it."""
    processor: str | None = None
    """`processor` of datasets that do not set it."""


def _not_a_name(written: Any, info: ValidationInfo) -> Any:
    """Refuse a string in the place of a dataset, with the key that it belongs to."""
    if not isinstance(written, str):
        return written
    is_path = Path(written).suffix != "" or "://" in written or Path(written).expanduser().exists()
    key = f"data.{info.field_name}.{'data_path' if is_path else 'dataset_name'}"
    raise ProblemError(Problem("", "a dataset is a section", got=written, remedy=f"Set {key}={written}"))


class DataConfig(Config):
    """Training and validation data: sources, columns, mixing, lengths."""

    train: Annotated[DatasetConfig | list[DatasetConfig], BeforeValidator(_not_a_name)]
    """Dataset to train on, or a list of datasets, which are mixed. `[]` for a run that learns from its users
    (`grpo.agent.live`)."""
    validation: Annotated[DatasetConfig | list[DatasetConfig] | None, BeforeValidator(_not_a_name)] = None
    """Dataset to validate on, or a list of datasets."""
    default: DatasetDefaults = DatasetDefaults()
    """Settings of every dataset that does not have its own."""
    max_input_seq_length: int | None = Field(default=None, gt=0)
    """Maximum number of tokens of a prompt, or of a training conversation; `policy.max_total_sequence_length` if
    unset."""
    overlong: OnFault = "error"
    """What to do with rows longer than `max_input_seq_length`: `error` ends the run, `skip` excludes them and logs
    their number."""
    malformed: OnFault = "error"
    """What to do with rows that are malformed or lack a column: `error` ends the run, `skip` excludes them and logs
    their number and the first one. A file that cannot be read at all always ends the run."""
    allow_image_urls: bool = False
    """Download images that rows give as http and https URLs, at most 32 MiB in 30 seconds each, and keep them in the
    data cache. Otherwise such rows are malformed, because a dataset would choose what this machine connects to."""
    max_video_frames: int = Field(default=8, gt=0)
    """Maximum number of frames of a video in a message. Of a video that has more, this number of evenly spaced frames
    is taken; each is an image and counts towards `policy.vision.max_images`."""
    shuffle: bool = True
    """Shuffle the training rows anew in every epoch; otherwise they keep their order."""
    num_workers: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Number of processes that render and tokenise rows; 0 does it in the driver."""

    @model_validator(mode="after")
    def _one_source_each(self) -> DataConfig:
        problems = written_problems("train", self.train) if self.train != [] else []
        if self.validation is not None:
            problems += written_problems("validation", self.validation)
        problems += _held_out_problems(self)
        if problems:
            raise ProblemError(*problems)
        return self

    @property
    def train_datasets(self) -> list[DatasetConfig]:
        """Training datasets with defaults filled in."""
        return self._filled(self.train)

    @property
    def validation_datasets(self) -> list[DatasetConfig]:
        """Validation datasets with defaults filled in. Training datasets with held-out rows come last, with their
        `split_validation_size`. Empty if there are none."""
        held_out = [dataset for dataset in self.train_datasets if dataset.split_validation_size is not None]
        return [*self._filled(self.validation or []), *held_out]

    def sections(self) -> Iterator[tuple[str, DatasetConfig | DatasetDefaults]]:
        """Yield every dataset as written in the config, and the defaults, each with its key from the root."""
        for key, datasets in (("data.train", self.train), ("data.validation", self.validation)):
            if isinstance(datasets, list):
                yield from ((f"{key}[{index}]", dataset) for index, dataset in enumerate(datasets))
            elif datasets is not None:
                yield key, datasets
        yield "data.default", self.default

    def _filled(self, datasets: DatasetConfig | list[DatasetConfig]) -> list[DatasetConfig]:
        known = {key: value for key, value in self.default if value is not None}
        filled = []
        for dataset in datasets if isinstance(datasets, list) else [datasets]:
            unset = {key: value for key, value in known.items() if key not in dataset.model_fields_set}
            filled.append(dataset.model_copy(update=unset))
        return filled


def weight_at(weight: Weight, step: int) -> float:
    """Return the weight of a dataset at a step, counted from 1."""
    if isinstance(weight, int | float):
        return float(weight)
    for (start, low), (end, high) in pairwise(weight):
        if start <= step <= end:
            return low + (high - low) * (step - start) / (end - start)
    return float(weight[0][1] if step < weight[0][0] else weight[-1][1])


class DataRoot(Protocol):
    """A resolved config with data."""

    data: DataConfig
    """The data to train and validate on."""


def dataset_names(settings: Sequence[DatasetConfig], purpose: Purpose) -> list[str]:
    """Return the names of datasets; equal names are numbered from the second one on, in the order of the config."""
    bases = [one.dataset_name or Path(one.source).name for one in settings]
    seen: Counter[tuple[str, str]] = Counter()
    chosen: list[str] = []
    for base, one in zip(bases, settings, strict=True):
        name, number = base, 1
        while (name, one.split or purpose) in seen or (number > 1 and name in bases):
            number += 1
            name = f"{base}#{number}"
        seen[name, one.split or purpose] += 1
        chosen.append(name)
    return chosen


def written_problems(key: str, datasets: DatasetConfig | list[DatasetConfig]) -> list[Problem]:
    """Return the problems of the sources and weights of one dataset or of several."""
    if isinstance(datasets, list):
        named = {f"{key}[{index}]": dataset for index, dataset in enumerate(datasets)}
    else:
        named = {key: datasets}
    problems = []
    for where, dataset in named.items():
        if (dataset.dataset_name is None) == (dataset.data_path is None):
            given = "both" if dataset.dataset_name else "neither"
            reason = f"sets {given} of `dataset_name` and `data_path`"
            problems.append(Problem(where, reason, remedy="Set exactly one of the two"))
        elif dataset.data_path is not None:
            reason = f"is for datasets given by `dataset_name`, but data_path is {dataset.data_path}"
            for name in ("subset", "settings", "streaming"):
                if value := getattr(dataset, name):
                    problems.append(Problem(f"{where}.{name}", reason, got=value, remedy="Remove this key"))
    if not named:
        problems.append(Problem(key, "must not be empty", got=datasets, remedy="Add a dataset, or remove this key"))
    problems += _weight_problems(key, named)
    missing = [where for where, dataset in named.items() if dataset.weight is None]
    if missing and len(missing) < len(named):
        reason = f"sets `weight` for some datasets only; missing for {', '.join(missing)}"
        problems.append(Problem(key, reason, remedy="Set it for all or for none"))
    return problems


def _weight_problems(key: str, named: Mapping[str, DatasetConfig]) -> list[Problem]:
    """Return the problems of weights that change during training."""
    changing = {f"{where}.weight": each.weight for where, each in named.items() if isinstance(each.weight, list)}
    problems = []
    for where, points in changing.items():
        steps = [point.step for point in points]
        if key != "train" or len(named) == 1:
            reason = "changes the share of a dataset among several of data.train"
            problems.append(Problem(where, reason, remedy="Remove this key"))
        elif not steps:
            problems.append(Problem(where, "must not be empty", got=[], remedy="Add a step, or remove this key"))
        elif steps != sorted(set(steps)):
            problems.append(Problem(where, "must have increasing steps", got=steps, remedy="Sort the list by `step`"))
    weights = [each.weight_by_step for each in named.values()]
    if problems or None in weights:
        return problems
    # Between two of these steps every weight is linear, so that their sum is 0 only if it is 0 at both.
    steps = sorted({point.step for points in changing.values() for point in points})
    empty = (step for step in steps if not any(weight_at(weight, step) for weight in weights if weight is not None))
    if (step := next(empty, None)) is not None:
        reason = f"all weights are 0 at step {step}, so there is nothing to draw"
        problems.append(Problem(key, reason, remedy="Set the weight of a dataset at this step above 0"))
    return problems


def _held_out_problems(data: DataConfig) -> list[Problem]:
    """Return the problems of keys of training datasets that are in the wrong place, or contradict each other."""
    problems = []
    one_by_one = "needs all rows of the dataset, but `streaming` reads them one by one"
    for key, dataset in data.sections():
        if not isinstance(dataset, DatasetConfig):
            continue
        at, size = key.removeprefix("data."), dataset.split_validation_size
        is_validation, is_streamed = key.startswith("data.validation"), dataset.streaming
        if is_streamed and is_validation:
            remedy = "Use a split that fits into memory, such as test[:1000]"
            problems.append(Problem(f"{at}.streaming", "is for training datasets only", got=True, remedy=remedy))
        elif dataset.where and is_streamed:
            problems.append(Problem(f"{at}.where", one_by_one, got=dataset.where, remedy="Remove one of the two"))
        elif dataset.pass_rate is not None and (is_validation or is_streamed):
            reason = "is for training datasets only; validation would score a selection of its rows"
            remedy = "Remove this key" if is_validation else "Remove one of the two"
            problems.append(Problem(f"{at}.pass_rate", reason if is_validation else one_by_one, remedy=remedy))
        elif size is not None and (is_validation or is_streamed):
            reason = "is for datasets of data.train, from which rows are held out" if is_validation else one_by_one
            remedy = "Remove this key" if is_validation else "Set data.validation instead"
            problems.append(Problem(f"{at}.split_validation_size", reason, got=size, remedy=remedy))
        elif size is not None and size > 1 and size != int(size):
            allowed = "a share below 1, or a whole number of rows"
            problems.append(Problem(f"{at}.split_validation_size", got=size, allowed=allowed))
    return problems
