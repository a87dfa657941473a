"""The plan of a recipe for a device, with the changes that make it fit or faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_core.devices import Device
from rl_core.errors import ConfigError
from rl_launch.doctor.machine import gpu_names
from rl_launch.monitoring.quantities import ALL_GPUS
from rl_launch.planning.accelerators import accelerator_of
from rl_launch.planning.changes import Change, Planner, fastest, smallest_change
from rl_launch.planning.learned import TIME, Took, learn, learned, measured_lengths
from rl_launch.planning.plan import Plan, device_of, plan_run
from rl_launch.planning.workload import Lengths, Workload
from rl_launch.recipes import source_name
from rl_launch.root_config import POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.directory.run_folder import RunFolder, is_run

if TYPE_CHECKING:
    from rl_launch.commands.verified_plan import Verified
    from rl_launch.planning.what_if import Simulation

NUM_FOUND = 5
"""Number of layouts that a search shows."""


class PlanAnswer(NamedTuple):
    """The plan of a recipe.

    Args:
        plan: The plan.
        change: Smallest change that fits; None if the plan fits, or nothing that was tried does.
        found: Fastest layouts, if they were asked for.
        took: Seconds and memory of the run that is planned; None if it has not run.
        verified: Parts of ranks counted on real layers, if they were asked for.
        simulation: What the run would take in other circumstances; None if nobody asked.
    """

    plan: Plan
    change: Change | None
    found: Sequence[Change]
    took: Took | None = None
    verified: Sequence[Verified] = ()
    simulation: Simulation | None = None


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
    simulates: bool = False,
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
        simulates: True to simulate what the run would take in other circumstances, as with `run` if it generates.

    Raises:
        ConfigError: If the config is wrong or does not fit the ranks of the device, the device is not known, or the
            run has nothing to learn from.
    """
    if not recipe and not run:
        raise ConfigError("Name a recipe, such as grpo-math-1b, or a run with --from RUN. rl recipes lists the recipes")
    source, given = recipe or run, lengths
    folder = RunFolder(Path(run or recipe).expanduser()) if run or is_run(Path(recipe).expanduser()) else None
    # A validation at the start has a row without a step.
    rows = [] if folder is None else [row for row in folder.metrics() if f"{TIME}step" in row]
    if run and not rows:
        raise ConfigError(f"--from {run}: no step of this run has ended yet. Wait for one, or remove --from")
    if folder is not None and rows:
        lengths = _of_run(rows, Workload.of(read_plan(folder.path), given), given)
    read = read_plan(source, overrides)
    _check_lengths(given, Workload.of(read, given))
    if searches and POLICY not in read.backends.models:
        raise ConfigError(f"--search: {read.plugin.name} trains no model, so there is no layout to search. Remove it")
    gpus = () if device else gpu_names()
    accelerator, kind = device_of(read, device, gpus)
    planner = partial(plan_run, name=source_name(source), accelerator=accelerator, device=kind, lengths=lengths)
    if folder is not None and learns:
        if device is None:
            _check_learnt_device(rows, kind, gpus)
        learn(folder, _planned(planner, read_plan(folder.path), kind))
    planner = partial(planner, factors=learned(accelerator.name))
    planned = _planned(planner, read, kind)
    is_own = folder is not None and Path(source).expanduser() == folder.path and not overrides
    change = smallest_change(read, planner) if planned.fits is False else None
    found = fastest(read, planner, num=NUM_FOUND) if searches else ()
    simulation, counted = None, []
    if verifies:
        from rl_launch.commands.verified_plan import verify

        counted = verify(read, planned)
    if simulates or (run and planned.engine is not None):
        from rl_launch.planning.what_if import simulated

        simulation = simulated(planned, folder if rows else None, has_times=is_own)
    return PlanAnswer(planned, change, found, Took.of(rows) if rows and is_own else None, counted, simulation)


def _of_run(rows: Sequence[Mapping[str, Any]], work: Workload, given: Lengths) -> Lengths:
    """Return the lengths of a run's rows, in place of those that the user does not state."""
    found = measured_lengths(rows, work)
    return Lengths(given.prompt or found.prompt, given.completion or found.completion, found.longest)


def _check_lengths(given: Lengths, work: Workload) -> None:
    """Refuse stated lengths that no row has."""
    if given.completion is not None and given.completion > work.longest:
        kind = "completion" if work.prompt else "row"
        raise ConfigError(
            f"--tokens: got {given.completion:,g}, but a {kind} has at most {work.longest:,} tokens. State fewer, or "
            f"raise {'policy.generation.max_new_tokens' if work.prompt else 'policy.max_total_sequence_length'}"
        )
    if given.prompt is not None and given.prompt >= work.longest_row:
        raise ConfigError(
            f"--prompt-tokens: got {given.prompt:,g}, but policy.max_total_sequence_length leaves a prompt at most "
            f"{work.longest_row - 1:,}. State fewer, or raise it"
        )


def _check_learnt_device(rows: Sequence[Mapping[str, Any]], kind: Device, gpus: Sequence[str]) -> None:
    """Refuse to learn for a device that this machine does not show the run to have used."""
    used_gpus = any(ALL_GPUS in row for row in rows)
    is_known = any(accelerator_of(gpu) is not None for gpu in gpus) if kind.runs_on_gpus else not used_gpus
    if not is_known:
        raise ConfigError(
            "--learn: the run used GPUs, and this machine has none of a known kind. Name theirs with --device, such as "
            "--device h100"
        )


def _planned(planner: Planner, run: RunPlan, device: Device) -> Plan:
    try:
        return planner(run)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{error} (the ranks are those of {device.ranks_key})") from None
