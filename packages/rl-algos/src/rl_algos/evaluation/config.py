"""Settings of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rl_algos.data.config import DatasetConfig, DatasetDefaults
from rl_core.config import Config, WhenChanged

_ALSO_CALLED = {
    "num_generations_per_prompt": "num_samples",
    "val_num_generations_per_prompt": "num_samples",
    "num_generations": "num_samples",
    "num_tests_per_prompt": "num_samples",
    "max_val_samples": "max_prompts",
    "max_samples": "max_prompts",
    "val_batches": "max_prompts",
}


class TaskConfig(Config):
    """A named dataset with the environment that scores it, and its sampling."""

    also_called: ClassVar[Mapping[str, str]] = _ALSO_CALLED

    name: str = Field(min_length=1)
    """Name of the task in results."""
    dataset: DatasetConfig
    """Its prompts, as `data.validation` gives them; `env_name` or the rows name the environment."""
    num_samples: int | None = Field(default=None, gt=0)
    """`eval.num_samples` of this task."""
    max_prompts: int | None = Field(default=None, gt=0)
    """`eval.max_prompts` of this task."""
    temperature: float | None = Field(default=None, ge=0)
    """`eval.temperature` of this task."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """`eval.top_p` of this task."""
    top_k: int | None = Field(default=None, gt=0)
    """`eval.top_k` of this task."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """`eval.max_new_tokens` of this task."""


class EvaluationConfig(Config):
    """Tasks, samples and estimates of `rl eval`, and of a run that scores the tasks while it trains."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME
    also_called: ClassVar[Mapping[str, str]] = _ALSO_CALLED

    tasks: list[str | TaskConfig] = []
    """Tasks to score: names (`gsm8k`, `math_500`, `reasoning_gym/TASK`, an installed dataset, or OWNER/NAME on the
    hub), files of data (`problems.jsonl`, or `NAME=problems.jsonl`), and tasks of your own with a `dataset`. If empty,
    the run's validation data."""
    default: DatasetDefaults = DatasetDefaults()
    """Settings of tasks that are files, such as the environment that scores them; a run's own datasets give those that
    are unset here, where they agree."""
    period: int = Field(default=0, ge=0)
    """Training: score `tasks` after every this many steps, as `rl eval` would with the weights of that step; 0 does
    not. The results are the metrics `eval/TASK/...`."""
    at_start: bool = False
    """Training: score `tasks` before the first step."""
    at_end: bool = False
    """Training: score `tasks` after the last step."""
    num_samples: int | None = Field(default=None, gt=0)
    """Samples of each prompt; the run's `val_num_generations_per_prompt` if unset, or 1 without a run."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Most prompts of each task, the first ones; of a run's validation data, its `max_val_samples` if unset."""
    temperature: float | None = Field(default=None, ge=0)
    """Temperature; 0 is greedy. `policy.generation.val_temperature` if unset."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass kept; `policy.generation.val_top_p` if unset."""
    top_k: int | None = Field(default=None, gt=0)
    """Most likely tokens kept; `policy.generation.val_top_k` if unset."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Most tokens sampled in one turn; `policy.generation.max_new_tokens` if unset."""
    max_turns: int | None = Field(default=None, gt=0)
    """Most turns of one sample; the run's `max_rollout_turns` if unset, or 1 without a run."""
    k: list[int] = []
    """Sizes of pass@k and cons@k, at most `num_samples`; if empty, the powers of two up to `num_samples`, and it."""
    pass_threshold: float = 1.0
    """Least reward of a sample that passes, for pass@k."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Probability mass of the confidence intervals; 1 less it is the level of significance of comparisons."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of sampling and of the intervals; the run's seed if unset, or 42 without a run."""

    @property
    def in_training(self) -> bool:
        """Whether a run that trains scores the tasks."""
        return bool(self.period or self.at_start or self.at_end)
