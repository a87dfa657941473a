"""The backends that a run has chosen, with their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_core.config import Config
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import BackendPlugin

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Backend(Generic[C]):
    """A backend and its settings, of types that pickle into a worker's environment.

    Args:
        plugin: its light half.
        config: the settings that mean the same for every backend.
        backend: its own.
    """

    plugin: BackendPlugin
    config: C
    backend: Config


@dataclass(frozen=True)
class Backends:
    """The backends of a run; `generation` is None where nothing is generated."""

    policy: Backend[ModelConfig]
    generation: Backend[GenerationConfig] | None
