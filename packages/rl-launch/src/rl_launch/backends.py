"""The backends that a run has chosen, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_core.config import Config
from rl_core.model import ModelSpec
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import BackendPlugin, Requirement

POLICY = "policy"
"""Role of the model whose weights are published and exported, and config section of the model that generates."""

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
class ModelBackend(Backend[ModelConfig]):
    """The training backend of one model.

    Args:
        section: dotted key of its config section.
        spec: the model's head, and whether it trains.
    """

    section: str
    spec: ModelSpec


@dataclass(frozen=True)
class GenerationBackend(Backend[GenerationConfig]):
    """The generation engine.

    Args:
        model: that it serves.
    """

    model: ModelConfig


@dataclass(frozen=True)
class Backends:
    """The backends of a run.

    Args:
        models: by role.
        generation: None if nothing is generated.
        requirements: what the algorithm sends to workers.
    """

    models: Mapping[str, ModelBackend]
    generation: GenerationBackend | None = None
    requirements: tuple[Requirement, ...] = ()
