"""Settings of the `reward_model` environment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config import PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig


class RewardModelConfig(EnvironmentConfig):
    """Scores a response by a reward model: one that `rl train` exported, or any sequence classifier with one label."""

    model: PathText | None = None
    """Folder with Hugging Face files, such as `runs/rm/checkpoints/step_400/hf`, or a hub name."""
    compare_with: str | None = None
    """Field of the row that holds a response to the same prompt; a reward is then the score above that of this one.
    If unset, the score itself."""
    reward: Literal["score", "probability"] = "score"
    """`probability` is the logistic function of the score, between 0 and 1; with `compare_with` it is the probability
    that the response is preferred to the one of the row."""
    device: Annotated[Literal["cpu", "cuda"], WhenChanged.RESUME] = "cpu"
    """Device of the model. On `cuda`, `env_vars: {CUDA_VISIBLE_DEVICES: "7"}` names a GPU that no model of the
    run uses: an environment's processes see none by themselves."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model."""
    max_length: int | None = Field(default=None, gt=0)
    """Most tokens of prompt and response together, of which the last ones are scored; as many as the model has
    positions if unset."""
    num_workers: Annotated[int | None, WhenChanged.RESUME] = Field(default=1, ge=1)
    """Processes, each with a copy of the model. `env_vars: {OMP_NUM_THREADS: "8"}` has one compute with 8 threads."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0)
    """Most seconds of a call; a rollout whose call takes longer fails."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=16, ge=1)
    """Most responses of one forward pass."""
    memory_limit_gib: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Most memory that a process may allocate; None for no limit."""
