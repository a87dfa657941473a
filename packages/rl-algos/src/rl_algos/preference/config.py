"""Settings of every algorithm that learns from preferences."""

from __future__ import annotations

from typing import Protocol

from rl_algos.data.config import DataRoot
from rl_algos.preference.comparison import Pairing
from rl_algos.supervised.config import SupervisedConfig
from rl_core.model_config import ModelConfig


class PreferenceConfig(SupervisedConfig):
    """Base of the section of an algorithm that learns from compared or judged responses."""

    pairing: Pairing = "best-worst"
    """Pairs to form from several ranked responses to a prompt: `best-worst` pairs the best with the worst, `all` forms
    every pair in which one response is better."""


class PreferenceRoot(DataRoot, Protocol):
    """The resolved config of preference learning, as far as every algorithm of it reads it."""

    @property
    def policy(self) -> ModelConfig:
        """The model that is trained."""
        ...
