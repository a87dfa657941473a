"""Tasks by name: small data, of the same settings that training has."""

from __future__ import annotations

from collections.abc import Mapping

from rl_algos.data.config import DatasetConfig
from rl_algos.evaluation.config import TaskConfig
from rl_core.config import did_you_mean
from rl_core.errors import ConfigError
from rl_core.plugins import DATASETS, names

GYM = "reasoning_gym"
"""Dataset whose tasks are named `reasoning_gym/TASK`."""

GYM_ROWS = 200
"""Questions of a task of reasoning-gym."""

TASKS: Mapping[str, DatasetConfig] = {
    "gsm8k": DatasetConfig(dataset_name="openai/gsm8k"),
    "math_500": DatasetConfig(dataset_name="HuggingFaceH4/MATH-500"),
    "aime_2024": DatasetConfig(dataset_name="HuggingFaceH4/aime_2024"),
    "aime_2025": DatasetConfig(dataset_name="math-ai/aime25"),
    # published scores are those of `test`; training validates on the smaller `validation`
    "mmlu": DatasetConfig(dataset_name="cais/mmlu", split="test"),
    "mmlu_pro": DatasetConfig(dataset_name="TIGER-Lab/MMLU-Pro"),
    "gpqa": DatasetConfig(dataset_name="Idavidrein/gpqa"),
}
"""Datasets of the hub by the names of their tasks; `rl_algos.data.hub_datasets` knows their columns and splits."""


def task_named(name: str) -> TaskConfig:
    """The task of that name: one of `TASKS`, `reasoning_gym/TASK`, an installed dataset, or a dataset of the hub.

    Raises:
        ConfigError: if there is no such task; the message names the nearest and all others.
    """
    if name in TASKS:
        return TaskConfig(name=name, dataset=TASKS[name])
    if name.startswith(f"{GYM}/"):
        settings = {"task": name.removeprefix(f"{GYM}/"), "size": GYM_ROWS}
        return TaskConfig(name=name, dataset=DatasetConfig(dataset_name=GYM, settings=settings))
    if name in names(DATASETS) or name.count("/") == 1:
        return TaskConfig(name=name, dataset=DatasetConfig(dataset_name=name))
    known = [*TASKS, *names(DATASETS)]
    raise ConfigError(
        f"eval.tasks: no task {name!r}{did_you_mean(name, known)}; named are {', '.join(sorted(known))}, "
        f"{GYM}/TASK and datasets of the hub as OWNER/NAME. A task of your own has a name and a dataset: "
        "eval.tasks='[{name: mine, dataset: {data_path: FILE, env_name: ENVIRONMENT}}]'"
    )
