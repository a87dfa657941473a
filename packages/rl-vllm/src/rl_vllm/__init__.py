"""Generation with vLLM."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
