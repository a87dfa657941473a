"""Settings and declaration of the environment `reward_model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config import PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement


class RewardModelConfig(EnvironmentConfig):
    """Scores a response by a reward model: one that `rl train` exported, or any sequence classifier with one label."""

    model: PathText | None = None
    """Reward model: a folder with Hugging Face files, such as `runs/rm/checkpoints/step_400/hf`, or a hub name."""
    compare_with: str | None = None
    """Field of the row that holds a response to the same prompt. The reward is then the difference to the score of that
    response. If unset, the score itself."""
    reward: Literal["score", "probability"] = "score"
    """Form of the reward: `probability` is the logistic function of the score, between 0 and 1. With `compare_with` it
    is the probability that the response is preferred to the row's response."""
    device: Annotated[Literal["cpu", "cuda"], WhenChanged.RESUME] = "cpu"
    """Device of the model. On `cuda`, set `env_vars: {CUDA_VISIBLE_DEVICES: "7"}` to a GPU that no model of the run
    uses, because the processes of an environment see no GPU by default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model."""
    max_length: int | None = Field(default=None, gt=0)
    """Maximum number of tokens in prompt and response together; of longer conversations the last ones are scored; if
    unset, the number of positions of the model."""
    num_workers: Annotated[int | None, WhenChanged.RESUME] = Field(default=1, ge=1)
    """Number of processes, each with a copy of the model. With `env_vars: {OMP_NUM_THREADS: "8"}` each computes with 8
    threads."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0)
    """Timeout of a call in seconds. A rollout whose call takes longer fails."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=16, ge=1)
    """Maximum number of responses in one forward pass."""
    memory_limit_gib: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Maximum memory in GiB that a process may allocate; null sets no limit."""


PLUGIN = EnvironmentPlugin(
    "reward_model",
    RewardModelConfig,
    "rl_envs.reward_model.environment:RewardModelEnvironment",
    Requirement(
        "rl-envs", extras={"cpu": ("reward-model",), "cuda": ("reward-model",)}, imports=("torch", "transformers")
    ),
)
