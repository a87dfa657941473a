"""Advantage estimators: pure functions from the rewards of a step to an advantage of each rollout or token."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
