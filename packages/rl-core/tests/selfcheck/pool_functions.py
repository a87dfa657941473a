"""Functions that ranks of a pool run."""

import os
import time

from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.rank_pool import Rank


def describe(rank: Rank, word: str) -> tuple[int, int, str, int]:
    return rank.rendezvous.rank, rank.rendezvous.world_size, word, os.getpid()


def count(rank: Rank) -> int:
    rank.held["count"] = rank.held.get("count", 0) + 1
    return rank.held["count"]


def fail_on_one(rank: Rank) -> None:
    if rank.rendezvous.rank == 1:
        raise KeyError("the second rank's fault")


def sleep(rank: Rank, seconds: float) -> None:
    time.sleep(seconds)


def die(rank: Rank) -> None:
    os._exit(3)


def mortal(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous) -> "MortalWorker":
    return MortalWorker(rendezvous.rank)


class MortalWorker:
    """A worker of which one rank ends its process when it is told to."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def coordinates(self) -> None:
        """None, as there is no mesh."""

    def die_on_the_second_rank(self) -> None:
        if self._rank == 1:
            os._exit(3)

    def close(self) -> None:
        """Nothing outlives the object."""
