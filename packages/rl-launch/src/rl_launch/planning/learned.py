"""What runs on a device took beside their plan: factors that later plans on that device are multiplied by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rl_core.errors import ConfigError
from rl_launch.planning.plan import Factors, Plan
from rl_launch.planning.workload import Lengths
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.worker_envs.node_build import default_root

SKIPPED = 2
"""First steps of a run that do not count: they compile, connect and fill caches."""
TIME = "time/"


def measured_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase over the steps of a run, without its first ones.

    Args:
        rows: Metrics of its steps.
    """
    counted = rows[SKIPPED:] or rows
    names = {name for row in counted for name in row if name.startswith(TIME)}
    found = {name: [row[name] for row in counted if row.get(name) is not None] for name in sorted(names)}
    return {name.removeprefix(TIME): median(values) for name, values in found.items() if values}


def measured_lengths(rows: Sequence[Mapping[str, Any]], num_rows: int) -> Lengths:
    """Return the mean tokens of completions of a run, or of its rows of data. Prompts are not in its metrics.

    Args:
        rows: Metrics of its steps.
        num_rows: Rows of a step.
    """
    name = "rollout/mean_length" if any("rollout/mean_length" in row for row in rows) else "train/num_tokens"
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return Lengths()
    mean = sum(values) / len(values)
    return Lengths(None, mean if name == "rollout/mean_length" else max(1.0, mean / num_rows))


def learned(device: str) -> Factors:
    """Return the factors that runs on a device taught; none if there was no run."""
    runs = _read(device)
    names = {name for run in runs.values() for name in run["seconds"]}
    seconds = {}
    for name in sorted(names):
        logs = [math.log(run["seconds"][name]) for run in runs.values() if name in run["seconds"]]
        seconds[name] = math.exp(sum(logs) / len(logs))
    return Factors(seconds, None, tuple(runs))


def learn(run: RunFolder, plan: Plan) -> Factors:
    """Keep what a run took over its plan, in place of what the same run taught before.

    Args:
        run: The run.
        plan: Its plan on the device that it ran on, with its own lengths and without factors.

    Returns:
        The factors of the device, this run included.

    Raises:
        ConfigError: If the run has no steps to learn from.
    """
    rows = run.metrics()
    measured = measured_seconds(rows)
    found = {
        phase: measured[phase] / planned
        for phase, planned in plan.seconds.items()
        if planned > 0 and measured.get(phase, 0.0) > 0
    }
    if not found:
        raise ConfigError(f"{run.path} has no phase with seconds that the plan has too, so there is nothing to learn")
    device = plan.machines.accelerator.name
    runs = {**_read(device), str(run.path.resolve()): {"seconds": found}}
    path = _path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    return learned(device)


def _path(device: str) -> Path:
    return default_root().parent / "plans" / f"{device}.json"


def _read(device: str) -> dict[str, Any]:
    path = _path(device)
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). Remove it; rl plan --from RUN --learn writes it again"
        ) from None
    return found
