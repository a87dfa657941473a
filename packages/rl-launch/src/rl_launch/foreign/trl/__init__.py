"""Scripts, commands and configs of TRL."""

from rl_launch.foreign.trl.config import algorithm_of, translate

__all__ = ["algorithm_of", "translate"]
