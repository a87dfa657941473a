"""A process of a rank pool as one of torch's ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rl_core.selfcheck.rank_pool import Rank


@contextmanager
def joined(rank: Rank) -> Iterator[dist.ProcessGroup]:
    """The group of all ranks, on gloo."""
    meeting = rank.rendezvous
    address = f"tcp://{meeting.address}:{meeting.port}"
    dist.init_process_group("gloo", init_method=address, rank=meeting.rank, world_size=meeting.world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
