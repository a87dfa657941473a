"""The process group of a model's ranks, and work whose failure on one rank reaches the others at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from rl_core.errors import PeerFailed
from rl_core.model import Rendezvous

PATIENCE = timedelta(days=1)
"""Bound of the wait for a rank that works: rank 0 downloads a model of any size, or writes it to a slow disk, for
longer than a collective may take. Whoever called the ranks has its own bound for the whole call, which ends first;
the end of a rank's process is noticed at once."""


def join_process_group(rendezvous: Rendezvous) -> None:
    """Join the default process group of this process; collective.

    The store of rank 0 listens on the address where the ranks meet and on no other, so that nobody outside the
    cluster's network reaches it. On GPUs all ranks connect by NCCL here, so that a network that does not carry it fails
    now and not in the first step. Ranks of gloo connect in pairs, at the first message between them.
    """
    rendezvous.kind.activate()
    # Otherwise each group opens a socket to each of its ranks: with hundreds of ranks a process runs out of them.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    timeout, device = timedelta(seconds=rendezvous.timeout_s), rendezvous.kind.torch_device
    leads = rendezvous.rank == 0
    listening = listen_at(rendezvous.address, rendezvous.port) if leads else None
    store = dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        is_master=leads,
        timeout=timeout,
        # The store closes it.
        master_listen_fd=None if listening is None else listening.detach(),
    )
    dist.init_process_group(
        rendezvous.kind.process_group_backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    # With a bound device, torch 2.13 makes each further group by a split of all ranks, members or not. A start makes
    # hundreds of groups, most of which NCCL never uses, and groups of gloo alone would wait forever, as only the ranks
    # outside of them take part in the split (https://github.com/pytorch/pytorch/issues/145376).
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = None


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens only at this address; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def on_rank0(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its failure is raised there, and as a `PeerFailed` elsewhere.

    Without it the others would wait in their next collective until its time-out.

    Args:
        group: All ranks, on gloo; its own time-out does not bound the action.
        action: Called on rank 0 only.
    """
    on_all_ranks(group, action if dist.get_rank(group) == 0 else lambda: None)


def on_all_ranks(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action` on every rank; a failure is raised on its rank, and on the others as a `PeerFailed`.

    Args:
        group: All ranks, on gloo; its own time-out does not bound the action.
        action: Called once on each rank.
    """
    world_size = dist.get_world_size(group)
    failed = torch.full((1,), world_size)
    message = ""
    try:
        action()
    except BaseException as error:
        failed.fill_(dist.get_rank(group))
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        # Ranks that are done wait for the others with patience.
        options = dist.AllreduceOptions()
        options.reduceOp = cast("dist.ReduceOp", dist.ReduceOp.MIN)
        options.timeout = PATIENCE
        group.allreduce([failed], options).wait()
        first = int(failed.item())
        words = [message]
        if first < world_size:
            dist.broadcast_object_list(words, group_src=first, group=group)
    if first < world_size:
        raise PeerFailed(f"rank {first} failed: {words[0]}")
