"""The plan of a recipe for a device, with the changes that make it fit or faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rl_launch.planning.changes import Change, fastest, smallest_change
from rl_launch.planning.plan import Plan, device_of, plan_run
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.reading import read_plan

NUM_FOUND = 5
"""Number of layouts that a search shows."""


class PlanAnswer(NamedTuple):
    """The plan of a recipe.

    Args:
        plan: The plan.
        change: Smallest change that fits; None if the plan fits, or nothing that was tried does.
        found: Fastest layouts, if they were asked for.
    """

    plan: Plan
    change: Change | None
    found: Sequence[Change]


def plan_recipe(
    recipe: str, overrides: Sequence[str], *, device: str | None, lengths: Lengths, searches: bool
) -> PlanAnswer:
    """Plan a recipe.

    Args:
        recipe: Its name, a YAML file, or a run directory.
        overrides: `key=value`.
        device: Name of the device; None for that of the config.
        lengths: Mean lengths that the user states.
        searches: True to list the fastest layouts.

    Raises:
        ConfigError: If the config is wrong, or the device is not known.
    """
    run = read_plan(recipe, overrides)
    accelerator, kind = device_of(run, device)
    planner = partial(plan_run, name=Path(recipe).stem, accelerator=accelerator, device=kind, lengths=lengths)
    planned = planner(run)
    change = smallest_change(run, planner) if planned.fits is False else None
    return PlanAnswer(planned, change, fastest(run, planner, num=NUM_FOUND) if searches else ())
