"""The number of ranks of an engine on each node of a replica, on CPU.

- Fault: an engine over nodes takes the number of devices of a node for the number of its ranks there, and a node has
  one CPU. With several ranks on each node, as in a rehearsal, the executor waits for answers of the second rank on a
  socket, while that rank is on the executor's node and answers through shared memory.
- vLLM 0.32.0, `vllm/distributed/device_communicators/shm_broadcast.py`
  (`MessageQueue.create_from_process_group_single_reader`).
- Upstream: no upstream issue found on 2026-11-30.
- Delete when `tests/patches/test_ranks_of_node.py::test_vllm_takes_the_second_rank_for_one_of_another_node` fails.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor.multiproc_executor import WorkerProc


def count_ranks_of_node_on_cpu() -> None:
    """Let ranks of one node answer through shared memory: a node has as many devices as ranks of the engine."""
    make_queues = WorkerProc._init_message_queues

    def counted(worker: WorkerProc, handle: Any, config: Any) -> None:
        count = config.parallel_config.local_world_size
        CpuPlatform.device_count = classmethod(lambda cls: count)
        make_queues(worker, handle, config)

    WorkerProc._init_message_queues = counted
