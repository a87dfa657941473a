"""A training step whose memory is planned, on ranks whose devices have different amounts of it."""

import logging
from dataclasses import dataclass

from joined_rank import joined

from rl_core.devices import Device, DeviceMemory
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.training.memory import StepPlan, planned_step

GB = 10**9


class ShownDevice(Device):
    """A device that shows the memory it is given."""

    def __init__(self, shown: DeviceMemory) -> None:
        super().__init__()
        vars(self).update(shown=shown, num_resets=0)

    def memory(self) -> DeviceMemory:
        return self.shown

    def reset_peak(self) -> None:
        vars(self)["num_resets"] += 1


@dataclass(frozen=True)
class Step:
    """Memory of a rank before a step, and how it changes in it.

    Args:
        before: Memory when the step begins.
        peak: Peak of the step.
        connected: Bytes that communicators take from the free memory in the step.
        needed: Bytes of the plan.
    """

    before: DeviceMemory
    peak: int
    connected: int = 0
    needed: int = 10 * GB


def step(rank: Rank, case: Step) -> tuple[list[int], list[tuple[int, str]]]:
    """The rooms that the plan was asked for, and the log."""
    rooms, messages = [], []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.levelno, record.getMessage()))

    def plan(room: int) -> StepPlan:
        rooms.append(room)
        return StepPlan("recompute=auto: no layer recomputed", {"weights": 4 * GB, "activations": case.needed - 4 * GB})

    log = logging.getLogger("rl_core.torch.training.memory")
    level, handler = log.level, Handler()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    device = ShownDevice(case.before)
    try:
        with joined(rank) as group, planned_step(plan, device, group):
            assert device.num_resets == 1
            free = case.before.free - case.connected
            vars(device)["shown"] = case.before._replace(free=free, peak=case.peak)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return rooms, messages
