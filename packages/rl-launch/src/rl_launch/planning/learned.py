"""What runs on a device took beside their plan: factors that later plans on that device are multiplied by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rl_core.errors import ConfigError
from rl_launch.planning.memory import GIB
from rl_launch.planning.plan import GENERATING, Factors, Plan
from rl_launch.planning.workload import Lengths, Workload
from rl_launch.root_config import POLICY
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.worker_envs.node_build import default_root

SKIPPED = 2
"""First steps of a run that do not count: they compile, connect and fill caches."""
TIME = "time/"
MIN_PLANNED = GIB
"""Fewest planned bytes that a factor of memory is learned from. On the CPU the pages of libraries are among a process's
peak, which decide for tiny models."""
_PEAK = re.compile(r"memory/(?P<role>\w+)/(?P<phase>\w+)_gib")
"""Metrics of models, which `peak_name` makes; those of single ranks have a hyphen."""
_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_RUNS = TypeAdapter(dict[str, dict[Literal["seconds", "memory"], dict[str, _Factor]]])
AHEAD = "idle/trainer"
"""Metric of runs that generate while they train; their seconds of generation are those that the trainer waits."""


def peak_name(holder: str, phase: str) -> str:
    """Return the name of the metric of the largest memory of a model, or of one of its ranks, in a phase."""
    return f"memory/{holder}/{phase}_gib"


def measured_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase over the steps of a run, without its first ones.

    Args:
        rows: Metrics of its steps.
    """
    counted = _counted(rows)
    names = {name for row in counted for name in row if name.startswith(TIME)}
    found = {name: _values(counted, name) for name in sorted(names)}
    return {name.removeprefix(TIME): median(values) for name, values in found.items() if values}


@dataclass(frozen=True)
class Took:
    """What a run took.

    Args:
        seconds: Median seconds of a step by phase.
        memory: Largest bytes of the tensors of a model's rank, by role and phase.
    """

    seconds: Mapping[str, float]
    memory: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Took:
        """Read the metrics of a run's steps."""
        peaks: dict[tuple[str, str], float] = {}
        for row in rows:
            for name, value in row.items():
                if (found := _PEAK.fullmatch(name)) and value:
                    key = found["role"], found["phase"]
                    peaks[key] = max(peaks.get(key, 0.0), value * GIB)
        return cls(measured_seconds(rows), peaks)


def measured_lengths(rows: Sequence[Mapping[str, Any]], work: Workload) -> Lengths:
    """Return the mean tokens of prompts and completions of a run, or of its rows of data.

    Args:
        rows: Metrics of its steps.
        work: Rows of a step.
    """
    counted = _counted(rows)

    def mean_of(name: str) -> float | None:
        values = _values(counted, name)
        return sum(values) / len(values) if values else None

    completion, longest = mean_of("rollout/mean_length"), mean_of("rollout/max_length")
    tokens = mean_of("train/num_tokens")
    row = None if tokens is None else max(1.0, tokens / work.num_trained / work.passes)
    if completion is None:
        return Lengths(None, row)
    return Lengths(None if row is None else max(1.0, row - completion), completion, longest)


def _counted(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    # Row 0 is that of a validation at the start.
    steps = [row for row in rows if row.get("step") != 0]
    return steps[SKIPPED:] or steps


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def learned(device: str) -> Factors:
    """Return the factors that runs on a device taught; none if there was no run."""
    runs = _read(device)

    def means(kind: Literal["seconds", "memory"]) -> dict[str, float]:
        of_runs = [run.get(kind, {}) for run in runs.values()]
        names = sorted({name for each in of_runs for name in each})
        return {name: geometric_mean([each[name] for each in of_runs if name in each]) for name in names}

    return Factors(means("seconds"), means("memory"), tuple(runs))


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
    took, overlaps = Took.of(rows), any(AHEAD in row for row in rows)
    found = {
        phase: took.seconds[phase] / planned
        for phase, planned in plan.seconds.items()
        if planned > 0 and took.seconds.get(phase, 0.0) > 0 and not (overlaps and phase == GENERATING)
    }
    peaks = {
        usage.phase: took.memory[POLICY, usage.phase] / usage.tensors
        for usage in plan.usages
        if usage.role == POLICY and usage.tensors >= MIN_PLANNED and (POLICY, usage.phase) in took.memory
    }
    if not found and not peaks:
        raise ConfigError(f"{run.path} has no phase with seconds that the plan has too, so there is nothing to learn")
    device = plan.machines.accelerator.name
    runs = {**_read(device), str(run.path.resolve()): {"seconds": found, "memory": peaks}}
    path = _path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    return learned(device)


def _path(device: str) -> Path:
    return default_root().parent / "plans" / f"{device}.json"


def _read(device: str) -> dict[str, dict[Literal["seconds", "memory"], dict[str, float]]]:
    path = _path(device)
    if not path.is_file():
        return {}
    try:
        return _RUNS.validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        place = " of ".join(map(str, reversed(problem["loc"])))
        raise ConfigError(
            f"{path} does not have the factors of runs: {place + ': ' if place else ''}{problem['msg']}. Remove it; "
            "rl plan --from RUN --learn writes it again"
        ) from None
