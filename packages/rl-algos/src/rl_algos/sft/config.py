"""Settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Literal, Protocol

from rl_algos.data.config import DataRoot
from rl_algos.supervised.config import SupervisedConfig
from rl_core.model_config import ModelConfig

LearnedTurns = Literal["all", "last"]


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: steps, epochs, what is learned of a row, validation."""

    learn: LearnedTurns = "all"
    """Turns of the assistant that are learned: all of them, or the last one. A message with `train: true` or
    `train: false` decides for itself."""
    mix_by: Literal["rows", "tokens"] = "rows"
    """Unit of the weights in `data.train`: shares of the rows that are drawn, or of the tokens under the loss."""


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
