"""Everything that is read of machines, workers and replicas, with its names in `metrics.jsonl` and in Prometheus."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rl_core.usage.gpus import GpuUsage
    from rl_core.usage.machine import MachineUsage
    from rl_core.usage.process import ProcessUsage

GIB = 2**30


@dataclass(frozen=True)
class Quantity:
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


def _memory(exported: str, meaning: str, recorded: str = "") -> Quantity:
    return Quantity(exported, meaning, recorded, 1 / GIB)


CPU_UTILIZATION = Quantity("rl_node_cpu_utilization_ratio", "Share of the cores in use", "cpu_utilization")
MEMORY = _memory("rl_node_memory_used_bytes", "Memory in use", "memory_gib")
MEMORY_TOTAL = _memory("rl_node_memory_bytes", "Memory of the node")
SHARED_MEMORY = _memory(
    "rl_node_shared_memory_used_bytes", "Files in /dev/shm, such as Ray's object store", "shared_memory_gib"
)

GPU_UTILIZATION = Quantity("rl_gpu_utilization_ratio", "Share of the time in which a kernel ran", "utilization")
GPU_MEMORY = _memory("rl_gpu_memory_used_bytes", "GPU memory in use", "memory_gib")
GPU_MEMORY_TOTAL = _memory("rl_gpu_memory_bytes", "Memory of the GPU")
GPU_POWER = Quantity("rl_gpu_power_watts", "Power of the GPU", "power_w")
GPU_TEMPERATURE = Quantity("rl_gpu_temperature_celsius", "Temperature of the GPU", "temperature_c")

WORKER_CPU = Quantity("rl_worker_cpu_cores", "Cores in use by a worker and its child processes", "cpu_cores")
WORKER_MEMORY = _memory("rl_worker_resident_memory_bytes", "Resident memory of a worker and its children", "memory_gib")
WORKER_GPU_MEMORY = _memory(
    "rl_worker_gpu_memory_bytes", "GPU memory of a worker and its child processes", "gpu_memory_gib"
)
WORKER_RESTARTS = Quantity(
    "rl_worker_restarts", "Processes that have replaced a worker since the driver started", kind="counter"
)

RUNNING = Quantity("rl_engine_running_requests", "Requests that the engine decodes", "running_requests")
WAITING = Quantity("rl_engine_waiting_requests", "Requests that wait for the engine", "waiting_requests")
KV_CACHE = Quantity("rl_engine_kv_cache_usage_ratio", "Share of the KV cache in use", "kv_cache_usage")
WEIGHT_VERSION = Quantity("rl_engine_weight_version", "Version of the weights that are served")
SAMPLED = Quantity("rl_engine_sampled_tokens", "Tokens sampled since the engine started", kind="counter")
DRAFTED = Quantity("rl_engine_draft_tokens", "Tokens proposed by speculative decoding", kind="counter")
ACCEPTED = Quantity("rl_engine_accepted_tokens", "Proposed tokens that were accepted", kind="counter")

_OF_HEALTH = {
    "num_running": RUNNING,
    "num_waiting": WAITING,
    "kv_cache_usage": KV_CACHE,
    "weight_version": WEIGHT_VERSION,
    "num_sampled": SAMPLED,
    "num_draft_tokens": DRAFTED,
    "num_accepted_tokens": ACCEPTED,
}
"""Quantities by the entries of `rl_core.rollouts.generation.Generator.health` that they are read from."""


@dataclass(frozen=True)
class Reading:
    """A value that was read.

    Args:
        quantity: What it is.
        subject: Middle part of its names among the metrics of a step, such as `node0/gpu1`.
        labels: Labels in Prometheus.
        value: In base units.
    """

    quantity: Quantity
    subject: str
    labels: Mapping[str, str]
    value: float

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The same for readings of the same thing."""
        return self.quantity.exported, tuple(self.labels.items())


def readings_of_machine(node: str, usage: MachineUsage, gpus: Collection[str]) -> Iterator[Reading]:
    """Readings of a machine.

    Args:
        node: Name of the node.
        usage: Its use.
        gpus: Indices or UUIDs of the GPUs that the run uses there; all GPUs if there are none among them.
    """
    labels = {"node": node}
    yield Reading(CPU_UTILIZATION, node, labels, usage.cpu_utilization)
    yield Reading(MEMORY, node, labels, usage.memory_bytes)
    yield Reading(MEMORY_TOTAL, node, labels, usage.memory_total_bytes)
    if usage.shared_memory_bytes is not None:
        yield Reading(SHARED_MEMORY, node, labels, usage.shared_memory_bytes)
    used = [gpu for gpu in usage.gpus if str(gpu.index) in gpus or gpu.uuid in gpus]
    for gpu in used or usage.gpus:
        yield from _readings_of_gpu(node, gpu)


def readings_of_process(worker: str, labels: Mapping[str, str], usage: ProcessUsage) -> Iterator[Reading]:
    """Readings of a worker's process.

    Args:
        worker: Name of the worker.
        labels: Its labels.
        usage: Its use.
    """
    yield Reading(WORKER_CPU, worker, labels, usage.cpu_cores)
    yield Reading(WORKER_MEMORY, worker, labels, usage.memory_bytes)
    if usage.gpu_memory_bytes is not None:
        yield Reading(WORKER_GPU_MEMORY, worker, labels, usage.gpu_memory_bytes)


def readings_of_engine(worker: str, labels: Mapping[str, str], health: Mapping[str, Any]) -> Iterator[Reading]:
    """Readings of a replica's engine: those that it reports.

    Args:
        worker: Name of the rollout worker.
        labels: Its labels.
        health: The report of its generator.
    """
    for name, quantity in _OF_HEALTH.items():
        if name in health:
            yield Reading(quantity, worker, labels, float(health[name]))


def _readings_of_gpu(node: str, gpu: GpuUsage) -> Iterator[Reading]:
    subject, labels = f"{node}/gpu{gpu.index}", {"node": node, "gpu": str(gpu.index)}
    values = {
        GPU_UTILIZATION: gpu.utilization,
        GPU_MEMORY: gpu.memory_bytes,
        GPU_MEMORY_TOTAL: gpu.memory_total_bytes,
        GPU_POWER: gpu.power_w,
        GPU_TEMPERATURE: gpu.temperature_c,
    }
    for quantity, value in values.items():
        if value is not None:
            yield Reading(quantity, subject, labels, value)
