"""Light interfaces of the post-training stack: data that crosses processes, protocols, config and plugins."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.callback import Callback as Callback
    from rl_core.data.batch import Batch as Batch
    from rl_core.data.ragged import Ragged as Ragged
    from rl_core.environments.reward_function import as_environment as as_environment
    from rl_core.errors import ConfigError as ConfigError
    from rl_core.errors import RLError as RLError
    from rl_core.errors import WeightSyncError as WeightSyncError
    from rl_core.model import Loss as Loss
    from rl_core.model import Model as Model
    from rl_core.model import ModelWorker as ModelWorker
    from rl_core.rollouts.environment import Conversation as Conversation
    from rl_core.rollouts.environment import Environment as Environment
    from rl_core.rollouts.environment import StepResult as StepResult
    from rl_core.rollouts.generation import Generator as Generator
    from rl_core.rollouts.generation import SamplingParams as SamplingParams
    from rl_core.rollouts.group import RolloutGroup as RolloutGroup
    from rl_core.rollouts.group import RolloutReport as RolloutReport
    from rl_core.rollouts.program import RolloutProgram as RolloutProgram
    from rl_core.rollouts.rollout import Completion as Completion
    from rl_core.rollouts.rollout import Prompt as Prompt
    from rl_core.rollouts.rollout import Rollout as Rollout
    from rl_core.rollouts.source import RolloutSource as RolloutSource

_HOMES = {
    "data.batch": ("Batch",),
    "callback": ("Callback",),
    "rollouts.environment": ("Conversation", "Environment", "StepResult"),
    "errors": ("ConfigError", "RLError", "WeightSyncError"),
    "rollouts.generation": ("Generator", "SamplingParams"),
    "rollouts.program": ("RolloutProgram",),
    "rollouts.source": ("RolloutSource",),
    "rollouts.group": ("RolloutGroup", "RolloutReport"),
    "model": ("Loss", "Model", "ModelWorker"),
    "data.ragged": ("Ragged",),
    "environments.reward_function": ("as_environment",),
    "rollouts.rollout": ("Completion", "Prompt", "Rollout"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # a fork server's launcher imports this package, and takes a third of the time without
        from importlib.metadata import version

        return version("rl-core")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"rl_core.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'rl_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
