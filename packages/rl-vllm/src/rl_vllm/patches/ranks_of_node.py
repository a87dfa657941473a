"""The number of ranks of an engine on each node of a replica, on CPU."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor.multiproc_executor import WorkerProc


def count_ranks_of_node_on_cpu() -> None:
    """Let ranks of one node answer through shared memory.

    An engine over nodes takes the number of devices of a node for the number of its ranks there (0.32), and a node has
    one CPU. With several ranks on each node, as in a rehearsal, the executor then finds no answers of the second rank.
    """
    make_queues = WorkerProc._init_message_queues

    def counted(worker: WorkerProc, handle: Any, config: Any) -> None:
        count = config.parallel_config.local_world_size
        CpuPlatform.device_count = classmethod(lambda cls: count)
        make_queues(worker, handle, config)

    WorkerProc._init_message_queues = counted
