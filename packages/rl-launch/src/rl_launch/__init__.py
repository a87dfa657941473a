"""The runtime: command line, clusters, placement, worker environments and runs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_launch.api.api import TrainResult, compare, evaluate, train
    from rl_launch.evaluation.result import EvaluationResult

__all__ = ["EvaluationResult", "TrainResult", "__version__", "compare", "evaluate", "train"]  # served by __getattr__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("rl-launch")
    if name in __all__:
        return getattr(import_module("rl_launch.api.api"), name)
    raise AttributeError(f"module 'rl_launch' has no attribute {name!r}")
