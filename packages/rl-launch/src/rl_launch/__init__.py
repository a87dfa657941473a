"""The runtime: command line, clusters, placement, worker environments and runs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

__all__ = ["__version__"]  # served by __getattr__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("rl-launch")
    raise AttributeError(f"module 'rl_launch' has no attribute {name!r}")
