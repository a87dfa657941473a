"""The plan of a recipe for a device, with the changes that make it fit or faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rl_core.errors import ConfigError
from rl_launch.doctor.machine import gpu_names
from rl_launch.planning.changes import Change, fastest, smallest_change
from rl_launch.planning.learned import learn, learned, measured_lengths
from rl_launch.planning.plan import Plan, device_of, plan_run
from rl_launch.planning.workload import Lengths, Workload
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.directory.run_folder import RunFolder

NUM_FOUND = 5
"""Number of layouts that a search shows."""


class PlanAnswer(NamedTuple):
    """The plan of a recipe.

    Args:
        plan: The plan.
        change: Smallest change that fits; None if the plan fits, or nothing that was tried does.
        found: Fastest layouts, if they were asked for.
        further: Counts on real layers and simulated cases of a finished run as lines of text, if they were asked for.
    """

    plan: Plan
    change: Change | None
    found: Sequence[Change]
    further: Sequence[str] = ()


def plan_recipe(
    recipe: str,
    overrides: Sequence[str],
    *,
    device: str | None,
    lengths: Lengths,
    searches: bool,
    run: str = "",
    learns: bool = False,
    verifies: bool = False,
) -> PlanAnswer:
    """Plan a recipe.

    Args:
        recipe: Its name, a YAML file, or a run directory; empty for the config of `run`.
        overrides: `key=value`.
        device: Name of the device; None for that of the config.
        lengths: Mean lengths that the user states.
        searches: True to list the fastest layouts.
        run: Run directory whose lengths and times are used; empty for none.
        learns: True to keep the times of that run for later plans.
        verifies: True to count on the model's real layers too.

    Raises:
        ConfigError: If the config is wrong, the device is not known, or the run has nothing to learn from.
    """
    if not recipe and not run:
        raise ConfigError("Name a recipe, such as grpo-math-1b, or a run with --from RUN. rl recipes lists the recipes")
    folder = own = None
    if run:
        folder, own = RunFolder(run), read_plan(run)
        of_run = measured_lengths(folder.metrics(), Workload.of(own, lengths))
        lengths = Lengths(lengths.prompt or of_run.prompt, lengths.completion or of_run.completion, of_run.longest)
    read = read_plan(recipe or run, overrides)
    accelerator, kind = device_of(read, device, [] if device else gpu_names())
    name = Path(recipe or run).stem
    if folder is not None and own is not None and learns:
        learn(folder, plan_run(own, name, accelerator=accelerator, device=kind, lengths=lengths))
    factors = learned(accelerator.name)
    planner = partial(plan_run, name=name, accelerator=accelerator, device=kind, lengths=lengths, factors=factors)
    planned = planner(read)
    change = smallest_change(read, planner) if planned.fits is False else None
    found = fastest(read, planner, num=NUM_FOUND) if searches else ()
    further: list[str] = []
    if verifies:
        from rl_launch.commands.verified_plan import lines as verified
        from rl_launch.commands.verified_plan import verify

        further += verified(verify(read, planned))
    if folder is not None and planned.engine is not None:
        from rl_launch.planning.what_if import RunFacts, lines

        further += lines(RunFacts.of_run(folder, planned))
    return PlanAnswer(planned, change, found, further)
