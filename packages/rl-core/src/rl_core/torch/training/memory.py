"""Memory of a training step: planned by the memory that is free, and compared with the peak of the first step.

A model is built before the engines that share its devices, and before its own communicators have connected. The memory
that they hold, asleep, can be measured only when the first step begins, so the plan is made then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl_core.devices import Device, DeviceMemory

_log = logging.getLogger(__name__)

GAPS = 0.1
"""Share of the available memory that a plan leaves to gaps between tensors, and to tensors that are not counted."""

COMMUNICATORS = 2**30
"""Bytes for communicators that connect in the first backward pass, about 0.5 GB each
(https://github.com/NVIDIA/nccl/issues/964). Those of forward passes are connected when memory is measured."""

REMEDY = (
    "Use smaller microbatches (sequence_packing.train_mb_tokens, or train_micro_batch_size without packing), more "
    "ranks, or recompute=full"
)


class PhasePeaks:
    """Largest memory of a rank by phase.

    On a GPU these are bytes of its tensors, and on the CPU resident bytes of the process, both without what there was
    when this was made. A process on the CPU keeps memory that earlier phases have freed.

    Args:
        kind: Device of the rank.
    """

    def __init__(self, kind: Device) -> None:
        self._kind, self._before = kind, kind.memory_bytes()
        self._found: dict[str, int] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Measure the block, and keep the largest number of bytes of the phase."""
        self._kind.reset_peak()
        try:
            yield
        finally:
            size = max(0, self._kind.peak_bytes() - self._before)
            self._found[phase] = max(size, self._found.get(phase, 0))

    def take(self) -> dict[str, int]:
        """Return the bytes of each phase since the last call. Any thread can call it."""
        found, self._found = self._found, {}
        return found


class StepPlan(NamedTuple):
    """Use of a device's memory in a training step.

    Args:
        decision: The choices that led to it, as a sentence without a full stop.
        parts: Bytes by the name of what takes them.
    """

    decision: str
    parts: Mapping[str, int]


class MeasuredRank(NamedTuple):
    """Memory of the device of a rank.

    Args:
        rank: The rank.
        memory: Its memory.
        left: Bytes that decided between the ranks.
    """

    rank: int
    memory: DeviceMemory
    left: int


def least_memory(
    kind: Device, group: dist.ProcessGroup, left: Callable[[DeviceMemory], int] = lambda memory: memory.available
) -> MeasuredRank | None:
    """Measure the devices of all ranks, and return the rank with the least memory; collective.

    Args:
        kind: Device of this rank.
        group: All ranks, on gloo.
        left: Function from a device's memory to the bytes that are compared.

    Returns:
        The same on every rank; None if devices have no memory of their own.
    """
    memory = kind.memory()
    if memory is None:
        return None
    found = [torch.empty(len(memory) + 1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([*memory, left(memory)]), group=group)
    rows = [row.tolist() for row in found]
    rank = min(range(len(rows)), key=lambda rank: rows[rank][-1])
    return MeasuredRank(rank, DeviceMemory(*rows[rank][:-1]), rows[rank][-1])


class ReservedMemory(NamedTuple):
    """A plan in effect, with the memory that it leaves on purpose.

    Args:
        plan: The plan.
        gaps: Bytes for gaps between tensors.
    """

    plan: StepPlan
    gaps: int


def plan_memory(
    plan: Callable[[int], StepPlan], kind: Device, group: dist.ProcessGroup, *, passes: str
) -> ReservedMemory | None:
    """Plan the use of the memory that is available now, and log the plan as a table; collective.

    Args:
        plan: Function from the bytes that may be taken, the same on every rank, to a plan. It is not called if devices
            have no memory of their own.
        kind: Device of this rank.
        group: All ranks, on gloo.
        passes: Name of the passes that the plan is for, for the log.

    Returns:
        The plan; None if devices have no memory of their own.
    """
    least = least_memory(kind, group)
    if least is None:
        return None
    available = least.memory.available
    reserve = {"gaps between tensors": round(GAPS * available)}
    if dist.get_world_size(group) > 1:
        reserve["communicators that connect later"] = COMMUNICATORS
    found = plan(available - sum(reserve.values()))
    parts = {**found.parts, **reserve}
    if dist.get_rank(group) == 0:
        _log.info("%s. %s", found.decision, table(least, parts))
        short = sum(parts.values()) - available
        if short > 0:
            _log.warning(
                "%s need %.1f GB more than rank %d has available, so that a microbatch of the largest size may run out "
                "of memory. %s",
                passes,
                short / 1e9,
                least.rank,
                REMEDY,
            )
    return ReservedMemory(found, reserve["gaps between tensors"])


@contextmanager
def planned_step(plan: Callable[[int], StepPlan], kind: Device, group: dist.ProcessGroup) -> Iterator[None]:
    """Plan the memory of training steps before the first one, and compare its peak with the plan after it; collective.

    Args:
        plan: See `plan_memory`; puts the plan into effect.
        kind: Device of this rank.
        group: All ranks, on gloo.
    """
    kind.release_memory()
    planned = plan_memory(plan, kind, group, passes="training steps")
    kind.reset_peak()
    yield
    # Communicators that have connected in the step hold memory that was available before it.
    fullest = least_memory(kind, group, lambda memory: memory.available - memory.peak)
    if planned is None or fullest is None or dist.get_rank(group) != 0:
        return
    size = sum(planned.plan.parts.values())
    found = (
        f"the tensors of the first training step took up to {fullest.memory.peak / 1e9:.1f} GB (rank {fullest.rank}), "
        f"{size / 1e9:.1f} GB were planned, and {fullest.left / 1e9:.1f} GB were left"
    )
    if fullest.left < planned.gaps:
        _log.warning("%s, less than is reserved for gaps: a later step may run out of memory. %s", found, REMEDY)
    else:
        _log.info("%s", found)


def table(least: MeasuredRank, parts: Mapping[str, int]) -> str:
    """Return the memory of a rank as lines of text, in GB.

    Args:
        least: The rank.
        parts: Bytes by the name of what takes them.
    """
    memory = least.memory
    lines = {
        "device": memory.total,
        "held by others, contexts and communicators": memory.available - memory.total,
        **{name: -size for name, size in parts.items()},
        "left": memory.available - sum(parts.values()),
    }
    width = max(map(len, lines))
    rows = [f"  {name:<{width}} {size / 1e9:9.2f}" for name, size in lines.items()]
    return "\n".join([f"Memory of rank {least.rank}, which has the least available, in GB:", *rows])
