"""Settings of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rl_algos.data.config import DatasetConfig, DatasetDefaults
from rl_core.config import Config, WhenChanged

_SAMPLES = ("num_generations_per_prompt", "val_num_generations_per_prompt", "num_generations", "num_tests_per_prompt")
_PROMPTS = ("max_val_samples", "max_samples", "val_batches")
_ALSO_CALLED = {**dict.fromkeys(_SAMPLES, "num_samples"), **dict.fromkeys(_PROMPTS, "max_prompts")}


class TaskConfig(Config):
    """A named dataset with the environment that scores it, and its sampling."""

    also_called: ClassVar[Mapping[str, str]] = _ALSO_CALLED

    name: str = Field(min_length=1)
    """Name of the task in results."""
    dataset: DatasetConfig
    """Dataset of its prompts, with the keys of `data.validation`; `env_name` or the rows select the environment."""
    num_samples: int | None = Field(default=None, gt=0)
    """Number of samples per prompt of this task; `eval.num_samples` if unset."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Maximum number of prompts of this task; `eval.max_prompts` if unset."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of this task; `eval.temperature` if unset."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling mass of this task; `eval.top_p` if unset."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens to sample from in this task; `eval.top_k` if unset."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens per turn of this task; `eval.max_new_tokens` if unset."""


class EvaluationConfig(Config):
    """Tasks, samples and estimates of `rl eval`, and of a run that scores tasks during training."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME
    also_called: ClassVar[Mapping[str, str]] = _ALSO_CALLED

    tasks: list[str | TaskConfig] = []
    """Tasks to score: names (`gsm8k`, `math_500`, `reasoning_gym/TASK`, an installed dataset, or OWNER/NAME on the
    hub), data files (`problems.jsonl`, or `NAME=problems.jsonl`), and your own tasks with a `dataset`. If empty, the
    run's validation data is scored."""
    default: DatasetDefaults = DatasetDefaults()
    """Settings of tasks that are files, such as the environment that scores them. Settings that are unset here come
    from the run's own datasets if these agree."""
    period: int = Field(default=0, ge=0)
    """Number of training steps between evaluations of `tasks`, each like `rl eval` with the weights of that step; 0
    turns them off. The results are the metrics `eval/TASK/...`."""
    at_start: bool = False
    """Score `tasks` before the first training step."""
    at_end: bool = False
    """Score `tasks` after the last training step."""
    num_samples: int | None = Field(default=None, gt=0)
    """Number of samples per prompt; the run's `val_num_generations_per_prompt` if unset, or 1 without rollouts."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Maximum number of prompts per task, from the start of its data. If unset, all prompts of a task, and the run's
    `max_val_samples` of its validation data."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy. `policy.generation.val_temperature` if unset."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling mass; `policy.generation.val_top_p` if unset."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens to sample from; `policy.generation.val_top_k` if unset."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens per turn; `policy.generation.max_new_tokens` if unset."""
    max_turns: int | None = Field(default=None, gt=0)
    """Maximum number of turns per sample; the run's `max_rollout_turns` if unset, or 1 without rollouts."""
    k: list[int] = []
    """Values of k for pass@k and cons@k, at most `num_samples`. If empty, the powers of two up to `num_samples`, and
    `num_samples` itself."""
    pass_threshold: float = 1.0
    """Minimum reward of a sample that passes, for pass@k."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Confidence level of the intervals; 1 minus this is the significance level of comparisons."""
    seed: int | None = Field(default=None, ge=0)
    """Seed for sampling and for the intervals; the seed of the run's rollouts if unset, or 42 without rollouts."""

    @property
    def in_training(self) -> bool:
        """True if a run scores the tasks during training."""
        return bool(self.period or self.at_start or self.at_end)
