"""The memory of a run's phases, recorded with each step next to what was planned of its memory and time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rl_launch.planning.accelerators import accelerator_of
from rl_launch.planning.learned import learned, peak_name
from rl_launch.planning.memory import GIB
from rl_launch.planning.plan import device_of, plan_run
from rl_launch.planning.text import verdict
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session.observer import ObservedRun, RunObserver

_log = logging.getLogger(__name__)

MAX_RANKS = 16
"""Maximum number of ranks of a model whose memory is recorded one by one; of larger ones the fullest is."""


class MeasuredModel(Protocol):
    """The ranks of a model, as their memory is asked for."""

    def health(self) -> Sequence[Mapping[str, Any]]:
        """Return the report of each rank; see `rl_core.model.ModelWorker.health`."""


class PlannedSteps(RunObserver):
    """Records what was planned of a run with each of its steps, and warns of a run that does not fit.

    Args:
        run: Its resolved config.
        name: Its name.
        gpus: Returns the GPUs of this machine, by the driver's names.
    """

    def __init__(self, run: RunPlan, name: str, gpus: Callable[[], Sequence[str]]) -> None:
        self._run, self._name, self._gpus = run, name, gpus
        self._metrics: dict[str, float] = {}

    def begin(self, run: ObservedRun) -> None:
        """Plan the run on the devices of this machine, with the factors that earlier runs taught. Warn if the memory of
        its GPUs is too small for a model or the engine."""
        gpus = self._gpus()
        accelerator, device = device_of(self._run, None, gpus)
        factors = learned(accelerator.name)
        plan = plan_run(self._run, self._name, accelerator=accelerator, device=device, factors=factors)
        if plan.fits is False and any(accelerator_of(gpu) is not None for gpu in gpus):
            command = f"rl plan {run.run_dir} --device {accelerator.name}"
            _log.warning("%s It may run out of memory; %s shows the smallest change that fits.", verdict(plan), command)
        self._metrics = {f"plan/{phase}": seconds for phase, seconds in plan.seconds.items()}
        if plan.seconds:
            self._metrics["plan/step"] = plan.step_seconds
        for usage in plan.usages:
            self._metrics[f"plan/{usage.role}/{usage.phase}_memory_gib"] = usage.tensors / GIB

    def step_metrics(self) -> Mapping[str, float]:
        """Return the planned seconds of phases and bytes of the fullest rank's tensors."""
        return self._metrics


class PhaseMemory(RunObserver):
    """Records the largest memory that the ranks of models took in each phase of a step.

    Args:
        models: The models by role.
    """

    def __init__(self, models: Mapping[str, MeasuredModel]) -> None:
        self._models = models

    def step_metrics(self) -> Mapping[str, float]:
        """Ask the ranks, and return the largest memory of each model by phase, and of each rank if there are few."""
        found: dict[str, float] = {}
        for role, model in self._models.items():
            peaks = [rank["peak_bytes"] for rank in model.health() if "peak_bytes" in rank]
            for phase in sorted({phase for each in peaks for phase in each}):
                found[peak_name(role, phase)] = max(each.get(phase, 0) for each in peaks) / GIB
                if 1 < len(peaks) <= MAX_RANKS:
                    for rank, each in enumerate(peaks):
                        found[peak_name(f"{role}-{rank}", phase)] = each.get(phase, 0) / GIB
        return found
