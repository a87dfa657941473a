"""Settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import Field

from rl_algos.data.config import DataRoot
from rl_core.config import Config, WhenChanged
from rl_core.model_config import ModelConfig

LearnedTurns = Literal["all", "last"]


class SFTConfig(Config):
    max_num_epochs: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Passes over the training data; unbounded where unset, but 1 where `max_num_steps` is unset as well."""
    max_num_steps: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Most optimizer steps; as many as the epochs have where unset."""
    val_period: Annotated[int, WhenChanged.RESUME] = Field(default=10, ge=0)
    """Validate after every so many steps; 0 never. Only where `data.validation` is given."""
    val_batches: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Batches of each validation dataset; all of it where unset."""
    val_global_batch_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Rows of a validation batch; `policy.train_global_batch_size` where unset."""
    val_at_start: Annotated[bool, WhenChanged.RESUME] = False
    """Validate before the first step as well."""
    val_at_end: Annotated[bool, WhenChanged.RESUME] = False
    """Validate after the last step as well."""
    stop_at_validation_loss: Annotated[float | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """End the run once the validation loss is at or below this."""
    learn: LearnedTurns = "all"
    """Turns of the assistant that are learned: all of them, or the last one. A message with `train: true` or
    `train: false` decides for itself."""
    mix_by: Literal["rows", "tokens"] = "rows"
    """Unit of the weights in `data.train`: shares of the rows that are drawn, or of the tokens under the loss."""
    seed: int = Field(default=42, ge=0)
    """Of the order of the data."""

    @property
    def num_epochs(self) -> int | None:
        """Epochs in force, None where steps alone bound the run."""
        return 1 if self.max_num_epochs is None and self.max_num_steps is None else self.max_num_epochs


class SFTRoot(DataRoot, Protocol):
    """The resolved config of supervised fine-tuning, as far as it reads it."""

    @property
    def sft(self) -> SFTConfig:
        """Settings of the loop."""
        ...

    @property
    def policy(self) -> ModelConfig:
        """The model that is trained."""
        ...
