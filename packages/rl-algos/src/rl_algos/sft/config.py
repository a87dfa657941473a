"""Settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Literal, Protocol

from rl_algos.data.config import DataRoot
from rl_algos.supervised.config import SupervisedConfig
from rl_core.model_config import ModelConfig

LearnedTurns = Literal["all", "last"]


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning: steps, epochs, learned parts of a row, validation."""

    learn: LearnedTurns = "all"
    """Assistant turns to train on: `all` of them, or only the `last` one. `train: true` or `train: false` in a message
    takes precedence."""
    mix_by: Literal["rows", "tokens"] = "rows"
    """Unit of the weights in `data.train`: they are shares of the drawn `rows`, or of the `tokens` in the loss."""


class SFTRoot(DataRoot, Protocol):
    """The resolved config of supervised fine-tuning, as far as it reads it."""

    sft: SFTConfig
    """Settings of the loop."""
    policy: ModelConfig
    """The model that is trained."""
