"""Receivers of weights for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

from torch import Tensor

from rl_core.devices import CPU, Device
from rl_core.selfcheck.rank_pool import Rank, RankPool, free_port
from rl_core.torch.transport import ipc, open_receiver
from rl_core.torch.transport.bucket import Parts
from rl_core.weights import Manifest, Transport

Received = tuple[dict[str, Tensor], str]
"""Tensors by name, and their digest as received."""

Taken = TypeVar("Taken")


def receive(manifest: Manifest, transport: Transport, parts: Parts | None = None) -> Received:
    """Return all tensors, or the parts of them, as the first receiver gets them, and their digest."""
    with open_receiver(manifest, transport, 1, CPU, parts) as receiver:
        tensors = {name: tensor.clone() for name, tensor in receiver}
    return tensors, receiver.digest


def sent_by_every_rank(bucket_bytes: int = 4096, timeout_s: float = 60) -> Transport:
    """Return a transfer with one receiver for each rank; run it within `ranks_apart`."""
    address = f"127.0.0.1:{free_port()}"
    return Transport("ipc", address, 1, bucket_bytes, timeout_s, every_rank_sends=True)


@contextmanager
def ranks_apart(pool: RankPool) -> Iterator[None]:
    """Make the sender of each rank in a pool wait where only `receiving_threads` of its rank look, as senders on GPUs
    do."""
    meeting_place = ipc._meeting_place

    def by_thread(transport: Transport, device: Device) -> str:
        return f"{meeting_place(transport, device)}/{threading.current_thread().name}"

    pool.run(_meet_apart, [()] * pool.num_ranks)
    generation = pool.generation
    try:
        with mock.patch.object(ipc, "_meeting_place", by_thread):
            yield
    finally:
        if pool.generation == generation:
            pool.run(_meet_again, [()] * pool.num_ranks)


@contextmanager
def receiving_threads(num_ranks: int, take: Callable[[], Taken]) -> Iterator[dict[int, Taken]]:
    """Run `take` in a thread for each rank; what each returned is in the dict once the block has been left."""
    received: dict[int, Taken] = {}

    def run(rank: int) -> None:
        received[rank] = take()

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    yield received
    for thread in threads:
        thread.join(60)


def _meet_apart(rank: Rank) -> None:
    original = ipc._meeting_place
    rank.held["meeting_place"] = original
    vars(ipc)["_meeting_place"] = lambda transport, device: f"{original(transport, device)}/{rank.rendezvous.rank}"


def _meet_again(rank: Rank) -> None:
    vars(ipc)["_meeting_place"] = rank.held.pop("meeting_place")
