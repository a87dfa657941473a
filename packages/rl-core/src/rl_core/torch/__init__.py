"""Tensor code that every training backend shares: packed rows, chunked logprobs, losses, weight transports."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
