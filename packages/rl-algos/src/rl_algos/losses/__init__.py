"""Losses as torch-free descriptions; each has its implementation in `rl_algos.torch`."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
