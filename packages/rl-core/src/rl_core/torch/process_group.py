"""The process group in which the ranks of one model meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from rl_core.model import Rendezvous


def join_process_group(rendezvous: Rendezvous) -> None:
    """Join the default process group of this process; collective.

    The store of rank 0 listens on the address at which the ranks meet and on no other, so that nobody outside the
    cluster's network reaches it.
    """
    rendezvous.kind.activate()
    timeout = timedelta(seconds=rendezvous.timeout_s)
    dist.init_process_group(
        rendezvous.kind.process_group_backend,
        store=_store(rendezvous, timeout),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )


def _store(rendezvous: Rendezvous, timeout: timedelta) -> dist.TCPStore:
    leads = rendezvous.rank == 0
    listening = listen_at(rendezvous.address, rendezvous.port) if leads else None
    return dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        is_master=leads,
        timeout=timeout,
        # the store closes it
        master_listen_fd=None if listening is None else listening.detach(),
    )


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens only at this address; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)
