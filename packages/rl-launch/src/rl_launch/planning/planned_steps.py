"""What was planned of a step, recorded with its metrics next to what the step took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_launch.planning.learned import learned
from rl_launch.planning.plan import Plan, device_of, plan_run
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session.observer import RunObserver

GIB = 2**30


class PlannedSteps(RunObserver):
    """Records the plan of a run with each of its steps.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        found = {f"plan/{phase}": seconds for phase, seconds in plan.seconds.items()}
        found["plan/step"] = plan.step_seconds
        for usage in plan.usages:
            found[f"plan/{usage.role}/{usage.phase}_memory_gib"] = usage.total / GIB
        self._metrics = found

    @classmethod
    def of(cls, run: RunPlan, name: str, gpus: Iterable[str]) -> PlannedSteps:
        """Plan a run on the devices of this machine, with the factors that earlier runs taught.

        Args:
            run: Its resolved config.
            name: Its name.
            gpus: GPUs of this machine, by the driver's names.
        """
        accelerator, device = device_of(run, None, gpus)
        factors = learned(accelerator.name)
        return cls(plan_run(run, name, accelerator=accelerator, device=device, factors=factors))

    def step_metrics(self) -> Mapping[str, float]:
        """Return the planned seconds of phases and memory of ranks."""
        return self._metrics
