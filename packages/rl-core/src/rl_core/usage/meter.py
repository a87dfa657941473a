"""What a worker's process answers to the driver that monitors it."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.usage.gpus import Gpus
from rl_core.usage.machine import CoreMeter, MachineUsage, read_memory, read_shared_memory
from rl_core.usage.process import ProcessMeter, ProcessUsage


@dataclass(frozen=True)
class Usage:
    """One reading.

    Args:
        process: Use by the process.
        machine: Use of its machine; None if it was not asked for.
    """

    process: ProcessUsage
    machine: MachineUsage | None = None


class Meter:
    """Reads the use of resources when it is asked. Nothing runs between two readings.

    A reading takes a few milliseconds: the process table is read once, and NVML is asked once per GPU.

    Args:
        with_children: Count the descendants of the process, too.
    """

    def __init__(self, *, with_children: bool = True) -> None:
        self._process = ProcessMeter(with_children=with_children)
        self._cores = CoreMeter()
        self._gpus: Gpus | None = None

    def read(self, *, with_machine: bool) -> Usage:
        """Use of resources since the reading before.

        Args:
            with_machine: Read the machine and its GPUs, too: one process of each machine does.
        """
        if self._gpus is None:
            self._gpus = Gpus.of_this_machine()
        process = self._process.read(self._gpus.memory_by_pid())
        return Usage(process, self._machine(self._gpus) if with_machine else None)

    def _machine(self, gpus: Gpus) -> MachineUsage:
        used, total = read_memory()
        return MachineUsage(
            cpu_utilization=self._cores.read(),
            memory_bytes=used,
            memory_total_bytes=total,
            shared_memory_bytes=read_shared_memory(),
            gpus=gpus.read(),
        )
