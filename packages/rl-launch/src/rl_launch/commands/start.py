"""The run of a command line of `rl train`: its config, its folder and its start."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.config import load, to_override
from rl_core.errors import ConfigError
from rl_launch.recipes import source_name
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.run_config.root_types import type_of
from rl_launch.run_session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.run_session.directory.branch import BranchPoint
from rl_launch.run_session.directory.checkpoint_name import LAST, CheckpointName
from rl_launch.run_session.directory.run_folder import CONFIG, RunFolder, is_run

_RUN_DIR = "run_dir="


class GivenRun(NamedTuple):
    """A run as the user asked for it.

    Args:
        plan: Plan of the run.
        run_dir: The folder of the run, which may hold it already.
        name: Shown with the progress.
        branch_point: The run and step that it starts from.
    """

    plan: RunPlan
    run_dir: Path
    name: str
    branch_point: BranchPoint | None = None


def run_of(recipe: str | Mapping[str, Any], overrides: Sequence[str] = (), start: str = "") -> GivenRun:
    """Return the run that the user asks for.

    Args:
        recipe: A recipe's name, a YAML file, the directory of a run to resume, or nested values as in such a file.
            Empty with `start`: the config of the run that is branched from.
        overrides: Keys to set.
        start: `RUN[:STEP]` to branch from; empty for none.

    Raises:
        ConfigError: If the config has problems; lists all of them.
        RunDirectoryError: If there is no such run to branch from.
    """
    point = BranchPoint.parse(start) if start else None
    if isinstance(recipe, Mapping) and recipe:
        plan = _trained_plan(recipe, overrides)
        name = plan.plugin.name
        folder = _folder(plan.config.run_dir, name)
        return GivenRun(_as_recorded(plan, recipe, overrides, folder), folder, name, point)
    recipe = str(recipe or "")
    if point is not None and (not recipe or "=" in recipe):
        recipe, overrides = str(point.run.path), [*([recipe] if recipe else []), *overrides]
    recipe = _run_to_resume(recipe) if point is None else recipe
    name = recipe_name(recipe)
    plan = _trained_plan(recipe, overrides)
    # the folder of the run that was given as the recipe, unless another branches from it
    given = Path(recipe).expanduser()
    is_of_run = is_run(given) and not any(override.startswith(_RUN_DIR) for override in overrides)
    folder = given
    if not is_of_run or point is not None:
        folder = _folder(None if is_of_run else plan.config.run_dir, name)
    return GivenRun(_as_recorded(plan, recipe, overrides, folder), folder, name, point)


def _trained_plan(source: str | Mapping[str, Any], overrides: Sequence[str]) -> RunPlan:
    """Read the config of a run that trains.

    Raises:
        ConfigError: If there are problems, or a section that only another command reads.
    """
    plan = read_plan(source, overrides)
    if vars(plan.config).get("tinker") is not None:
        raise ConfigError("tinker: rl train does not read this section. Remove it, or run rl serve tinker")
    return plan


def _as_recorded(plan: RunPlan, recipe: str | Mapping[str, Any], overrides: Sequence[str], folder: Path) -> RunPlan:
    """Return the plan with the values that a run in the folder has for keys which its version did not have, so that the
    command that started it resumes it; a value that the user writes stays."""
    if not is_run(folder) or plan.raw is None or RunFolder(folder).is_of_this_version():
        return plan
    as_before: Mapping[str, Any] = {}
    with suppress(ConfigError):  # refused when the folder is taken
        recorded = load(folder / CONFIG)
        as_before = recorded.upgraded(type_of(recorded))[1].as_before
    added = [to_override(key, value) for key, value in as_before.items() if not plan.raw.is_written(key)]
    return read_plan(recipe, [*overrides, *added]) if added else plan


def _run_to_resume(recipe: str) -> str:
    """Return the folder of the run if a recipe is the name of its newest checkpoint; any other recipe as it is.

    Raises:
        ConfigError: If it is another checkpoint, because a run continues from its newest.
    """
    named = CheckpointName.parse(recipe)
    if named is None:
        return recipe
    if named.which not in ("", LAST) and named.checkpoint() != newest_checkpoint(named.run):
        raise ConfigError(
            f"a run is resumed from its newest checkpoint. To branch from {recipe}, into a new run:\n"
            f"  rl train --from {shlex.quote(recipe)}"
        )
    return str(named.run)


def recipe_name(recipe: str) -> str:
    """Return the name of a recipe's runs: the recipe's name, or the file's without its ending.

    Raises:
        ConfigError: If it is missing, or an override is given instead.
    """
    if not recipe:
        raise ConfigError("rl train needs a recipe, a YAML file or a run directory: rl train RECIPE [KEY=VALUE]...")
    if "=" in recipe:
        raise ConfigError(f"got {recipe!r} instead of a recipe. Write rl train RECIPE {recipe}")
    return source_name(recipe)


def _folder(configured: str | None, name: str) -> Path:
    return Path(configured or f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}").expanduser()
