"""Everything that is read of machines, workers and replicas, with its names in `metrics.jsonl` and in Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rl_core.usage.meter import MachineUsage


PREFIX = "system/"
"""Prefix of the metrics of readings."""

ALL_GPUS = "system/gpu_utilization"
"""Mean utilization of all GPUs."""


GIB = 2**30


class SystemReadings:
    """Readings as they arrive from one thread, taken by others: per step as a mean and a maximum, and the newest of
    each thing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[object, SystemReading] = {}
        # These are the sum, the number and the maximum of the readings of each thing in the step in progress.
        self._over_step: dict[tuple[str, str], tuple[float, int, float]] = {}

    def add(self, readings: Iterable[SystemReading]) -> None:
        """Take readings in."""
        with self._lock:
            for reading in readings:
                self._newest[reading.key] = reading
                quantity = reading.quantity
                if quantity.recorded:
                    key, value = (reading.subject, quantity.recorded), reading.value * quantity.scale
                    total, count, largest = self._over_step.get(key, (0.0, 0, value))
                    self._over_step[key] = (total + value, count + 1, max(largest, value))

    def forget(self, label: str, value: str) -> None:
        """Forget the newest readings of everything with a label, because it no longer answers."""
        with self._lock:
            self._newest = {key: reading for key, reading in self._newest.items() if reading.labels.get(label) != value}

    def forget_all(self) -> None:
        """Forget the newest readings of everything, because the workers have ended."""
        with self._lock:
            self._newest = {}

    @property
    def has_any(self) -> bool:
        """True if something was read in the step in progress."""
        return bool(self._over_step)

    def take(self) -> dict[str, float]:
        """Return the metrics of the step in progress, which ends with the call: `system/<subject>/<name>` is the mean
        of its readings and `system/<subject>/max_<name>` the largest."""
        with self._lock:
            found, self._over_step = self._over_step, {}
        metrics: dict[str, float] = {}
        of_gpus = []
        for (subject, name), (total, count, largest) in found.items():
            metrics[f"{PREFIX}{subject}/{name}"] = total / count
            metrics[f"{PREFIX}{subject}/max_{name}"] = largest
            if name == GPU["utilization"].recorded:
                of_gpus.append(total / count)
        if of_gpus:
            metrics[ALL_GPUS] = sum(of_gpus) / len(of_gpus)
        return metrics

    def newest(self) -> Sequence[SystemReading]:
        """Return the newest reading of each thing."""
        with self._lock:
            return tuple(self._newest.values())


@dataclass(frozen=True)
class SystemQuantity:
    """Something that is read.

    Args:
        exported: Its name in Prometheus, in base units.
        meaning: Help text there.
        recorded: Last part of its names among the `system/*` metrics of a step; empty if it is only exported.
        scale: Recorded value of one base unit.
        kind: `counter` if the value only increases.
    """

    exported: str
    meaning: str
    recorded: str = ""
    scale: float = 1.0
    kind: Literal["gauge", "counter"] = "gauge"


def _memory(exported: str, meaning: str, recorded: str = "") -> SystemQuantity:
    return SystemQuantity(exported, meaning, recorded, 1 / GIB)


def _counter(exported: str, meaning: str) -> SystemQuantity:
    return SystemQuantity(exported, meaning, kind="counter")


Quantities = Mapping[str, SystemQuantity]
"""Quantities by the name of the value that they are read from."""

MACHINE: Quantities = {
    "cpu_utilization": SystemQuantity("rl_node_cpu_utilization_ratio", "Share of the cores in use", "cpu_utilization"),
    "memory_bytes": _memory("rl_node_memory_used_bytes", "Memory in use", "memory_gib"),
    "memory_total_bytes": _memory("rl_node_memory_bytes", "Memory of the node"),
    "shared_memory_bytes": _memory(
        "rl_node_shared_memory_used_bytes", "Files in /dev/shm, such as Ray's object store", "shared_memory_gib"
    ),
}
"""Quantities of `MachineUsage`."""

GPU: Quantities = {
    "utilization": SystemQuantity("rl_gpu_utilization_ratio", "Share of the time in which a kernel ran", "utilization"),
    "memory_bytes": _memory("rl_gpu_memory_used_bytes", "GPU memory in use", "memory_gib"),
    "memory_total_bytes": _memory("rl_gpu_memory_bytes", "Memory of the GPU"),
    "power_w": SystemQuantity("rl_gpu_power_watts", "Power of the GPU", "power_w"),
    "temperature_c": SystemQuantity("rl_gpu_temperature_celsius", "Temperature of the GPU", "temperature_c"),
}
"""Quantities of `GpuUsage`."""

PROCESS: Quantities = {
    "cpu_cores": SystemQuantity("rl_worker_cpu_cores", "Cores in use by a worker and its child processes", "cpu_cores"),
    "memory_bytes": _memory(
        "rl_worker_resident_memory_bytes", "Resident memory of a worker and its children", "memory_gib"
    ),
    "gpu_memory_bytes": _memory(
        "rl_worker_gpu_memory_bytes", "GPU memory of a worker and its child processes", "gpu_memory_gib"
    ),
}
"""Quantities of `ProcessUsage`."""

HEALTH: Quantities = {
    "num_running": SystemQuantity("rl_engine_running_requests", "Requests that the engine decodes", "running_requests"),
    "num_waiting": SystemQuantity(
        "rl_engine_waiting_requests", "Requests that wait for the engine", "waiting_requests"
    ),
    "kv_cache_usage": SystemQuantity(
        "rl_engine_kv_cache_usage_ratio", "Share of the KV cache in use", "kv_cache_usage"
    ),
    "weight_version": SystemQuantity("rl_engine_weight_version", "Version of the weights that are served"),
    "num_sampled": _counter("rl_engine_sampled_tokens", "Tokens sampled since the engine started"),
    "num_draft_tokens": _counter("rl_engine_draft_tokens", "Tokens proposed by speculative decoding"),
    "num_accepted_tokens": _counter("rl_engine_accepted_tokens", "Proposed tokens that were accepted"),
}
"""Quantities of `rl_core.rollouts.generation.Generator.health`, of which a generator may report some."""

WORKER_RESTARTS = _counter("rl_worker_restarts", "Processes that have replaced a worker since the driver started")

QUANTITIES = (*MACHINE.values(), *GPU.values(), *PROCESS.values(), *HEALTH.values(), WORKER_RESTARTS)
"""Everything that is read."""


@dataclass(frozen=True)
class SystemReading:
    """A value that was read.

    Args:
        quantity: The measured quantity.
        subject: Middle part of its names among the metrics of a step, such as `node0/gpu1`.
        labels: Labels in Prometheus.
        value: In base units.
    """

    quantity: SystemQuantity
    subject: str
    labels: Mapping[str, str]
    value: float

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The same for readings of the same thing."""
        return self.quantity.exported, tuple(self.labels.items())


def readings_of(
    quantities: Quantities, subject: str, labels: Mapping[str, str], values: Mapping[str, Any]
) -> Iterator[SystemReading]:
    """Yield the readings of a machine, a GPU, a process or an engine: those that it reports.

    Args:
        quantities: What is read.
        subject: Name of the node or worker.
        labels: Its labels.
        values: Its use, or the report of its generator, by name.
    """
    for name, quantity in quantities.items():
        if values.get(name) is not None:
            yield SystemReading(quantity, subject, labels, float(values[name]))


def readings_of_machine(node: str, usage: MachineUsage, gpus: Collection[str]) -> Iterator[SystemReading]:
    """Yield the readings of a machine and its GPUs.

    Args:
        node: Name of the node.
        usage: Its use.
        gpus: Indices or UUIDs of the GPUs that the run uses there; all GPUs if there are none among them.
    """
    yield from readings_of(MACHINE, node, {"node": node}, vars(usage))
    used = [gpu for gpu in usage.gpus if str(gpu.index) in gpus or gpu.uuid in gpus]
    for gpu in used or usage.gpus:
        yield from readings_of(GPU, f"{node}/gpu{gpu.index}", {"node": node, "gpu": str(gpu.index)}, vars(gpu))
