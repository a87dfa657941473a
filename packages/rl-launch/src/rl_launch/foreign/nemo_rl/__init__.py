"""Configs of NeMo RL: what is worked out from several keys. The others are in `tables/nemo-rl.yaml`."""

from rl_launch.foreign.nemo_rl.config import algorithm_of, translate

__all__ = ["algorithm_of", "translate"]
