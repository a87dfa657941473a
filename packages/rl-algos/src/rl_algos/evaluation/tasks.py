"""Tasks by name: small data with the same settings as training data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.sources.files import kind_of
from rl_algos.evaluation.config import EvaluationConfig, TaskConfig
from rl_core.config import did_you_mean
from rl_core.errors import ConfigError
from rl_core.plugins import DATASETS, names

GYM = "reasoning_gym"
"""Dataset whose tasks are named `reasoning_gym/TASK`."""

GYM_ROWS = 200
"""Questions of a task of reasoning-gym."""

_AROUND = ("env_name", "prompt_file", "system_prompt_file")
_OF_COLUMNS = ("input_key", "output_key", "columns", "processor")
"""Keys of a dataset that a file of rows takes from the datasets of its run."""

TASKS: Mapping[str, DatasetConfig] = {
    "gsm8k": DatasetConfig(dataset_name="openai/gsm8k"),
    "math_500": DatasetConfig(dataset_name="HuggingFaceH4/MATH-500"),
    "aime": DatasetConfig(dataset_name="di-zhang-fdu/AIME_1983_2024"),
    "aime_2024": DatasetConfig(dataset_name="HuggingFaceH4/aime_2024"),
    "aime_2025": DatasetConfig(dataset_name="math-ai/aime25"),
    # Published scores are on `test`; training validates on the smaller `validation`.
    "mmlu": DatasetConfig(dataset_name="cais/mmlu", split="test"),
    "mmlu_pro": DatasetConfig(dataset_name="TIGER-Lab/MMLU-Pro"),
    "gpqa": DatasetConfig(dataset_name="Idavidrein/gpqa"),
    "ifeval": DatasetConfig(dataset_name="google/IFEval"),
    "humaneval_plus": DatasetConfig(dataset_name="evalplus/humanevalplus"),
    "mbpp_plus": DatasetConfig(dataset_name="evalplus/mbppplus"),
    # The library that reads the hub's datasets refuses this one, whose files are listed by a program.
    "livecodebench": DatasetConfig(
        data_path="hf://datasets/livecodebench/code_generation_lite/test*.jsonl", processor="livecodebench"
    ),
}
"""Datasets of the hub by task; `rl_algos.data.sources.hub_datasets` has their columns and splits."""

PARTS = {
    "aime": "Year",
    "gpqa": "High-level domain",
    "livecodebench": "difficulty",
    "math_500": "level",
    "mmlu": "subject",
    "mmlu_pro": "category",
}
"""Column whose values are parts of a task, as in `math_500/5`, by task."""


def task_of(given: str | TaskConfig, settings: EvaluationConfig, data: DataConfig | None) -> TaskConfig:
    """Return a task of `eval.tasks` with its dataset.

    Args:
        given: Entry of the list.
        settings: Section `eval`.
        data: Data of the run; None without one.

    Raises:
        ConfigError: If there is no such task; the message lists the nearest and all others.
    """
    if not isinstance(given, str):
        return given
    name, file = _named_file(given)
    if not file:
        return task_named(given)
    unset = {key: value for key, value in of_run(data).items() if getattr(settings.default, key) is None}
    own = {key: value for key, value in settings.default if value is not None}
    return TaskConfig(name=name, dataset=DatasetConfig(data_path=file, **{**unset, **own}))


def is_file(given: str) -> bool:
    """Return whether a task of `eval.tasks` is a file, a folder, a pattern or an address of data."""
    return bool(_named_file(given)[1])


def of_run(data: DataConfig | None) -> dict[str, Any]:
    """Return the settings that the datasets of a run give to a file of rows: the equal settings of its validation
    datasets, or else of its training datasets. Columns and processors are only taken from files.

    Args:
        data: Data of the run; None without one.
    """
    datasets = [] if data is None else data.validation_datasets or data.train_datasets
    keys = _AROUND + (_OF_COLUMNS if all(each.data_path is not None for each in datasets) else ())
    found = {key: [getattr(each, key) for each in datasets] for key in keys}
    agreed = {key: values[0] for key, values in found.items() if values and values.count(values[0]) == len(values)}
    return {key: value for key, value in agreed.items() if value}


def task_named(name: str) -> TaskConfig:
    """Return the task of that name: one of `TASKS` or a part of it, `reasoning_gym/TASK`, an installed dataset, or one
    of the hub.

    Raises:
        ConfigError: If there is no such task; the message lists the nearest and all others.
    """
    if name in TASKS:
        return TaskConfig(name=name, dataset=TASKS[name])
    whole, _, part = name.partition("/")
    if part and whole in PARTS:
        return TaskConfig(name=name, dataset=TASKS[whole].model_copy(update={"where": {PARTS[whole]: part}}))
    if name.startswith(f"{GYM}/"):
        settings = {"task": name.removeprefix(f"{GYM}/"), "size": GYM_ROWS}
        return TaskConfig(name=name, dataset=DatasetConfig(dataset_name=GYM, settings=settings))
    if name in names(DATASETS) or name.count("/") == 1:
        return TaskConfig(name=name, dataset=DatasetConfig(dataset_name=name))
    known = [*TASKS, *names(DATASETS)]
    raise ConfigError(
        f"eval.tasks: {name!r} is not a task{did_you_mean(name, known)}; allowed: {', '.join(sorted(known))}, "
        f"{GYM}/TASK, parts of {', '.join(PARTS)} (such as math_500/5), and datasets of the hub as OWNER/NAME. To use "
        "your own data, pass a file, such as problems.jsonl, with eval.default.env_name=ENVIRONMENT; or a task with a "
        "name and a dataset: eval.tasks='[{name: mine, dataset: {data_path: FILE, env_name: ENVIRONMENT}}]'"
    )


def _named_file(given: str) -> tuple[str, str]:
    """Return the name and path of a task that is a file, a folder, a pattern or an address; empty for other tasks."""
    name, equals, path = given.partition("=")
    path = path if equals else given
    place = Path(path).expanduser()
    if not (kind_of(place.name) or "://" in path or place.exists()):
        return "", ""
    while not equals and kind_of(place.name):
        place = place.with_suffix("")
    return name if equals else place.name, path
