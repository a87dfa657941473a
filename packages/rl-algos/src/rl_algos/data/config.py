"""Settings of data: the source of rows, and how they become conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from rl_core.config import Config, PathText, Problem, ProblemError, WhenChanged

Purpose = Literal["train", "validation"]


class DatasetConfig(Config):
    dataset_name: str | None = None
    """Name of an installed dataset or of a dataset on the hub; give this or `data_path`."""
    data_path: PathText | None = None
    """JSON Lines, Parquet or Arrow: a file, a folder or a glob pattern; give this or `dataset_name`."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    split: str | None = None
    """Split to read; by default `train` or `validation`, according to its purpose.

    For a folder: the files whose names start with it; all of them if unset.
    """
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of an installed dataset; `rl data list` shows them."""
    input_key: str | None = None
    """Column with the input: text, or a list of messages; the column `messages` if unset."""
    output_key: str | None = None
    """Column with the answer; if unset, the column `answer` if there is one."""
    columns: dict[str, str] = {}
    """Columns of other names than a processor expects: the expected name to that of the row, such as
    `{chosen: preferred, rejected: other}`."""
    weight: float | None = Field(default=None, gt=0)
    """Share of draws, relative to the other datasets; if unset for all, in proportion to their rows."""
    env_name: str | None = None
    """Scores completions: a function of yours (`file.py:function` or `package.module:function`), an installed
    environment, or one of `env`; the one that the row names if unset."""
    prompt_file: PathText | None = None
    """Text file that the input is put into, at `{input}`; `{column}` is replaced by that column of the row."""
    system_prompt_file: PathText | None = None
    """Text file with a system message to put first."""
    processor: str | None = None
    """How a row becomes a conversation: a built-in name (`gsm8k`, `squad`, and for preferences `preference`,
    `helpsteer3`, `ultrafeedback`), or a function of yours, `file.py:function` or `package.module:function`, called as
    `function(row, settings)` and returning an `Example`.

    If unset, `input_key` and `output_key` decide; in preference learning `preference`.
    """

    @property
    def source(self) -> str:
        """The dataset as the user named it."""
        return self.dataset_name or self.data_path or ""


class DatasetDefaults(Config):
    subset: str | None = None
    """`subset` of datasets that do not set it."""
    input_key: str | None = None
    """`input_key` of datasets that do not set it."""
    output_key: str | None = None
    """`output_key` of datasets that do not set it."""
    columns: dict[str, str] | None = None
    """`columns` of datasets that do not set it."""
    env_name: str | None = None
    """`env_name` of datasets that do not set it."""
    prompt_file: PathText | None = None
    """`prompt_file` of datasets that do not set it."""
    system_prompt_file: PathText | None = None
    """`system_prompt_file` of datasets that do not set it."""
    processor: str | None = None
    """`processor` of datasets that do not set it."""


class DataConfig(Config):
    train: DatasetConfig | list[DatasetConfig]
    """The dataset to train on, or several that are mixed."""
    validation: DatasetConfig | list[DatasetConfig] | None = None
    """The dataset to validate on, or several."""
    default: DatasetDefaults = DatasetDefaults()
    """Settings of every dataset that does not state its own."""
    max_input_seq_length: int | None = Field(default=None, gt=0)
    """Most tokens of a prompt, or of a training conversation; `policy.max_total_sequence_length` if unset."""
    overlong: Literal["error", "skip"] = "error"
    """Whether rows longer than `max_input_seq_length` end the run (`error`) or are left out (`skip`); the log counts
    them."""
    shuffle: bool = True
    """Shuffle the training rows anew in every epoch; otherwise they keep their order."""
    num_workers: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Processes that render and tokenise rows; 0 uses the driver."""

    @model_validator(mode="after")
    def _one_source_each(self) -> DataConfig:
        problems = [
            *_problems("train", self.train),
            *(_problems("validation", self.validation) if self.validation is not None else ()),
        ]
        if problems:
            raise ProblemError(*problems)
        return self

    @property
    def train_datasets(self) -> list[DatasetConfig]:
        """Training datasets with defaults filled in."""
        return self._filled(self.train)

    @property
    def validation_datasets(self) -> list[DatasetConfig]:
        """Validation datasets with defaults filled in; empty if there are none."""
        return self._filled(self.validation or [])

    def sections(self) -> Iterator[tuple[str, DatasetConfig | DatasetDefaults]]:
        """Every dataset as written in the config, and the defaults, each with its key from the root."""
        for key, datasets in (("data.train", self.train), ("data.validation", self.validation)):
            if isinstance(datasets, list):
                yield from ((f"{key}[{index}]", dataset) for index, dataset in enumerate(datasets))
            elif datasets is not None:
                yield key, datasets
        yield "data.default", self.default

    def _filled(self, datasets: DatasetConfig | list[DatasetConfig]) -> list[DatasetConfig]:
        known = {key: value for key, value in self.default if value is not None}
        return [
            dataset.model_copy(
                update={key: value for key, value in known.items() if key not in dataset.model_fields_set}
            )
            for dataset in _several(datasets)
        ]


class DataRoot(Protocol):
    """A resolved config with data."""

    @property
    def data(self) -> DataConfig:
        """The data to train and validate on."""
        ...


def dataset_names(settings: Sequence[DatasetConfig], purpose: Purpose) -> list[str]:
    """Names of datasets; if names are equal, the second and later ones are numbered, in the order of the config."""
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


def _several(datasets: DatasetConfig | list[DatasetConfig]) -> list[DatasetConfig]:
    return datasets if isinstance(datasets, list) else [datasets]


def _problems(key: str, datasets: DatasetConfig | list[DatasetConfig]) -> list[Problem]:
    several = _several(datasets)
    at = [f"{key}[{index}]" for index in range(len(several))] if isinstance(datasets, list) else [key]
    problems = [
        problem for where, dataset in zip(at, several, strict=True) for problem in _dataset_problems(where, dataset)
    ]
    if not several:
        problems.append(Problem(key, "got an empty list; name a dataset, or leave the key out"))
    weighted = [dataset.weight is not None for dataset in several]
    if any(weighted) and not all(weighted):
        missing = ", ".join(where for where, has in zip(at, weighted, strict=True) if not has)
        problems.append(
            Problem(key, f"`weight` is set for some datasets and not for {missing}; set it for all or for none")
        )
    return problems


def _dataset_problems(key: str, dataset: DatasetConfig) -> list[Problem]:
    if (dataset.dataset_name is None) == (dataset.data_path is None):
        got = "both" if dataset.dataset_name else "neither"
        return [Problem(key, f"got {got} of `dataset_name` and `data_path`; give exactly one")]
    if dataset.data_path is None:
        return []
    return [
        Problem(f"{key}.{name}", f"belongs to a dataset given by `dataset_name`; {dataset.data_path!r} is a path")
        for name, value in (("subset", dataset.subset), ("settings", dataset.settings))
        if value
    ]
