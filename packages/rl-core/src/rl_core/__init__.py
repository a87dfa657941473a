"""Light interfaces of the post-training stack: data that crosses processes, protocols, config and plugins."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
