"""Recorders of `rl_core.tracing.profiling` that torch has."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rl_core.tracing.profiling import ProfileOrder

MAX_ALLOCATIONS = 200_000
"""Number of the newest allocations and releases in a memory snapshot."""


class TorchRecorder:
    """`torch.profiler`: operators of this thread with their shapes and, on CUDA, kernels; a Chrome trace."""

    def __init__(self, order: ProfileOrder) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path = order.path("torch.json.gz")
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self.start = self._profile.start

    def stop(self) -> Path:
        """Write the trace."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return self._path


class MemoryRecorder:
    """The history of torch's CUDA allocator, with the stacks of allocations, as a snapshot."""

    def __init__(self, order: ProfileOrder) -> None:
        self._path = order.path("memory.pickle")

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: If there is no CUDA device.
        """
        if not torch.cuda.is_available():
            raise RuntimeError("the memory history is torch's CUDA allocator's, and this process has no CUDA device")
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def stop(self) -> Path:
        """Write the snapshot."""
        try:
            torch.cuda.memory._dump_snapshot(str(self._path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return self._path


class NsysRange:
    """The range that Nsight Systems records of a process which was started under `nsys profile`.

    nsys writes the report itself, to the path of its own command line.
    """

    def __init__(self, order: ProfileOrder) -> None:
        del order

    start = staticmethod(torch.cuda.profiler.start)
    """Begins the range (cudaProfilerStart)."""

    def stop(self) -> None:
        """End the range (cudaProfilerStop)."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
