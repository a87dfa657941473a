"""Configs of NeMo RL."""

from rl_launch.foreign.nemo_rl.config import algorithm_of, translate

__all__ = ["algorithm_of", "translate"]
