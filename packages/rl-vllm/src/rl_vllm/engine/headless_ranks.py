"""Ranks of vLLM's engine on a node without its front."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread

import psutil
from vllm import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_tcp_uri
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rl_vllm.engine.engine_output import ends_of
from rl_vllm.engine.nodes import FirstNode

END_S = 5.0
"""Maximum time in seconds from the end of a process to its exit code."""


class HeadlessRanks:
    """Processes of an engine, or of several data-parallel ones, whose front is on the first node of the replica.

    Args:
        parts: What vLLM holds its processes by.
        processes: The processes.
        first: Connection to the first node.
    """

    def __init__(
        self, parts: MultiprocExecutor | CoreEngineProcManager, processes: Sequence[BaseProcess], first: FirstNode
    ) -> None:
        self._parts = parts
        self._processes = processes
        self._first = first
        Thread(target=self._report_ends, name="rank-watch", daemon=True).start()

    @classmethod
    def start(cls, arguments: AsyncEngineArgs, first: FirstNode) -> HeadlessRanks:
        """Start the processes, as `vllm serve --headless` does; returns when ranks of an engine over nodes are loaded,
        or when engines of this node have been started.

        Args:
            arguments: Arguments of vLLM.
            first: Connection to the first node.
        """
        Thread(target=_end_with, args=(first,), name="first-node", daemon=True).start()
        config = arguments.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT, headless=True)
        parallel = config.parallel_config
        if parallel.node_rank_within_dp > 0:
            executor = MultiprocExecutor(config, monitor_workers=False)
            return cls(executor, [worker.proc for worker in executor.workers], first)
        address = get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
        engines = CoreEngineProcManager(
            local_engine_count=parallel.data_parallel_size_local,
            start_index=parallel.data_parallel_rank,
            local_start_index=0,
            vllm_config=config,
            local_client=False,
            handshake_address=address,
            executor_class=Executor.get_class(config),
            log_stats=False,
        )
        return cls(engines, engines.processes, first)

    def _report_ends(self) -> None:
        """Wait until one of the processes has ended, and tell the first node."""
        by_sentinel = {process.sentinel: process for process in self._processes}
        ended = [by_sentinel[sentinel] for sentinel in wait(list(by_sentinel)) if isinstance(sentinel, int)]
        for process in ended:
            # A process has an exit code only some time after its end.
            process.join(END_S)
        self._first.report(ends_of(ended) or "its engine ended")


def _end_with(first: FirstNode) -> None:
    """Wait for the end of the first node, then kill the processes of this node's engine."""
    first.await_end()
    for child in active_children():
        with suppress(psutil.NoSuchProcess):
            for each in (*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)):
                each.kill()
