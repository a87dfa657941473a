"""Paths of runs, or of parts of runs, that do not exist."""

from __future__ import annotations

import re
from pathlib import Path

from rl_algos import hub
from rl_core.config import Problem
from rl_launch.session.directory.run_folder import RUNS, no_run, runs_in

_SUFFIX = re.compile(r":(?:best|last|(?:step_)?\d+)$")


def absent_run(name: str) -> Problem | None:
    """Return the problem of a path of a run that does not exist, with the command that lists the existing ones; None if
    it is the path of something else.

    A path below `runs` is the path of a run unless a hub model of this name was downloaded. So is a path in a folder
    that contains other runs.
    """
    run = run_of_path(name)
    if run.exists() or len(run.parts) < 2 or run.suffix in (".yaml", ".yml"):
        return None
    if not run.is_absolute() and hub.is_cached("model", name):
        return None
    return no_run(run) if run.parts[0] == RUNS or runs_in(run.parent) else None


def run_of_path(name: str) -> Path:
    """Return the run directory in a path such as `runs/mine/checkpoints/step_3/hf` or `runs/mine:3`, or the path
    itself.
    """
    path = Path(_SUFFIX.sub("", name)).expanduser()
    if "checkpoints" not in path.parts[1:]:
        return path
    return Path(*path.parts[: path.parts.index("checkpoints", 1)])
