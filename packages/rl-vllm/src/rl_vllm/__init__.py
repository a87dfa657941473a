"""Generation with vLLM."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vllm.config import VllmConfig as VllmConfig
    from rl_vllm.generator import VllmGenerator as VllmGenerator
    from rl_vllm.plugin import PLUGIN as PLUGIN

_HOME_OF = {"PLUGIN": "plugin", "VllmConfig": "config", "VllmGenerator": "generator"}

__all__ = sorted([*_HOME_OF, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("rl-vllm")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"rl_vllm.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'rl_vllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
