"""Speed of an all-reduce over ranks of several nodes: `python -m rl_core.torch.all_reduce ARGUMENTS`, once per rank.

The process ends when its standard input is closed, and so with the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from rl_core.model import Rendezvous
from rl_core.torch.process_group import join_process_group

NUM_WARM_UPS = 2
NUM_TIMED = 5


def all_reduce_seconds(rendezvous: Rendezvous, num_bytes: int) -> float:
    """Return the median duration in seconds of an all-reduce of float32 values; collective.

    Args:
        rendezvous: Address where the ranks meet, and the device of this one.
        num_bytes: Size of the tensor on each rank in bytes.

    Raises:
        RuntimeError: If the result is not the sum over all ranks.
    """
    join_process_group(rendezvous)
    try:
        device, world_size = rendezvous.kind, rendezvous.world_size
        tensor = torch.empty(max(1, num_bytes // 4), dtype=torch.float32, device=device.torch_device)
        expected = world_size * (world_size + 1) / 2
        durations = []
        for _ in range(NUM_WARM_UPS + NUM_TIMED):
            tensor.fill_(rendezvous.rank + 1)
            device.synchronize()
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(tensor)
            device.synchronize()
            durations.append(time.perf_counter() - begun)
        low, high = (float(value) for value in tensor.aminmax())
        if low != expected or high != expected:
            raise RuntimeError(f"the all-reduce gave values from {low:g} to {high:g} instead of {expected:g}")
        return median(durations[NUM_WARM_UPS:])
    finally:
        dist.destroy_process_group()


def main(arguments: str) -> None:
    """Measure and print `{"seconds": ...}`.

    Args:
        arguments: JSON object of the fields of `Rendezvous`, and `num_bytes`.
    """
    asked: dict[str, Any] = json.loads(arguments)
    num_bytes = asked.pop("num_bytes")
    seconds = all_reduce_seconds(Rendezvous(**asked), num_bytes)
    sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    main(sys.argv[1])
    sys.stdout.flush()
    # the interpreter would wait for the lock of the standard input that the thread holds
    os._exit(0)
