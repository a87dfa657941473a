"""Paths that name a run, or a part of one, that does not exist."""

from __future__ import annotations

from pathlib import Path

from rl_algos import hub
from rl_core.config import did_you_mean
from rl_launch.model_files.run_models import parts_of
from rl_launch.session.directory.run_folder import is_run

RUNS = "runs"
"""Folder in which runs are made by default."""


def absent_run(name: str) -> str:
    """Return the problem of a path that names a run which does not exist, with the command that lists those that do;
    empty if it names something else.

    A path below `runs` names a run, unless a model of the hub of that name was downloaded, and so does one in a folder
    with other runs.
    """
    run = run_of_path(name)
    if run.exists() or len(run.parts) < 2 or run.suffix in (".yaml", ".yml"):
        return ""
    folder, is_default = run.parent, run.parts[0] == RUNS
    if not run.is_absolute() and hub.is_cached("model", name):
        return ""
    others = sorted(str(each) for each in folder.iterdir() if is_run(each)) if folder.is_dir() else []
    if not others and not is_default:
        return ""
    near = did_you_mean(str(run), others)
    return f"no run at {run}{near}; `rl runs{'' if is_default else f' {folder}'}` lists them"


def run_of_path(name: str) -> Path:
    """Return the run directory in a path such as `runs/mine/checkpoints/step_3/hf` or `runs/mine:3`, or the path
    itself.
    """
    path = Path(parts_of(name)[0]).expanduser()
    if "checkpoints" not in path.parts[1:]:
        return path
    return Path(*path.parts[: path.parts.index("checkpoints", 1)])
