"""`rl train`, `rl sweep`, `rl quickstart` and `rl worker-envs`: commands that train, and prepare it."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from rl_launch.cli.failure import UNFINISHED, explained, reported, resumable
from rl_launch.cli.options import Overrides, Verbose, keys, named, option


def train(
    recipe: Annotated[
        str,
        named(
            "RECIPE|FILE.yaml|RUN", "Name of a recipe, a YAML file, or a run directory to resume. Optional with --from."
        ),
    ] = "",
    overrides: Annotated[list[str] | None, keys("Config keys to set, such as grpo.seed=7 or run_dir=DIR.")] = None,
    start: Annotated[
        str, option("--from", "Branch from a checkpoint of another run (default: its newest one).", "RUN[:STEP]")
    ] = "",
    fresh: Annotated[bool, option("--fresh", "Fail if run_dir already contains a run.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train a model with a recipe. If run_dir contains a run with the same config, that run is resumed.

    With --from, a new run starts from the weights, optimizer state, step and data position of another run's checkpoint.

    The exit code is 75 if the run has ended before its last step and the same command resumes it: after a signal, at
    the time limit, if a lost node was not replaced, or if Ray on this machine was killed.
    """
    with reported() as failure, resumable():
        from rl_launch.commands.start import run_of

        given = run_of(recipe, overrides or (), start)
        failure.run_dir = given.run_dir

        from rl_launch.commands.train import train as run
        from rl_launch.run_session import show_logs

        show_logs(verbose=verbose)
        outcome = run(given.plan, run_dir=given.run_dir, title=given.name, fresh=fresh, branch_point=given.branch_point)
        sys.stdout.write(f"{given.run_dir}\n")
        sys.stderr.write(f"next: rl show {shlex.quote(str(given.run_dir))}, or rl view for all runs in a browser\n")
        if not outcome.is_finished:
            raise typer.Exit(UNFINISHED)


def sweep(
    recipe: Annotated[
        str, named("RECIPE|FILE.yaml|RUN", "Name of a recipe, a YAML file, or a run directory whose config is used.")
    ],
    overrides: Annotated[
        list[str] | None,
        keys(
            "Keys and their values. Quote a value that contains a comma, or put it in brackets, as in YAML.",
            metavar="KEY=A,B... [run_dir=FOLDER]",
        ),
    ] = None,
    verbose: Annotated[bool, option("--verbose -v", "Log more.")] = False,
) -> None:
    """Train once for every combination of values, one run after another on the same Ray cluster, and list the results.

    Each run has its own folder in FOLDER (default: runs/RECIPE-sweep) and is identical to rl train with the same keys.
    Run the same command again to resume: finished runs are skipped and interrupted ones are resumed. If a run fails,
    the others are still trained, and the exit code is 1.
    """
    with reported(shows_logs=True, verbose=verbose):
        from rich.console import Console

        from rl_launch.commands.runs import listed, show
        from rl_launch.commands.sweep import run_sweep, sweep_of

        found = sweep_of(recipe, overrides or ())
        failures, stopped = run_sweep(found, explained)
        columns = found.listing()
        if runs := listed(found.folders(), columns):
            show(runs, found.folder, Console(), now=datetime.now().astimezone(), listing=columns)
        for name, message in failures.items():
            # the log has the whole message, at the time of the failure
            sys.stderr.write(f"error: {name}: {message.splitlines()[0]}\n")
        if stopped is not None:
            stopped.exit_if_stopped()
        if failures:
            raise typer.Exit(1)


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[run_dir=DIR] [cluster.KEY=VALUE]...")] = None,
) -> None:
    """Train a tiny model on sums with SFT and GRPO, and show what it learned. Takes a few minutes on any machine."""
    with reported(shows_logs=True) as failure:
        from rl_core.errors import ConfigError

        run_dir, cluster = Path("runs/quickstart"), []
        for override in overrides or ():
            key, _, value = override.partition("=")
            if key == "run_dir" and value:
                run_dir = Path(value).expanduser()
            elif key.startswith("cluster.") and value:
                cluster.append(override)
            else:
                raise ConfigError(f"got {override!r}; allowed: run_dir=DIR and cluster.KEY=VALUE")
        failure.run_dir = run_dir

        from rl_launch.commands.quickstart import run

        run(run_dir, cluster)


def worker_envs(
    recipe: Annotated[str, named("RECIPE|FILE.yaml|RUN", "The recipe whose workers they are for.")],
    overrides: Overrides = None,
    roles: Annotated[
        list[str] | None, option("--role", "Only this role, such as policy, generation or env.math.", "ROLE")
    ] = None,
) -> None:
    """Build the Python environments of a recipe's workers, as a run does before it starts, and print the interpreter of
    each role.

    Use it in an image, or on a node before a run. With cluster.device=cuda it builds the environments for GPUs on any
    machine. They are kept under RL_HOME.
    """
    with reported(shows_logs=True):
        from rl_launch.commands.diagnosis import build_worker_envs

        for role, python in build_worker_envs(recipe, overrides or (), roles=roles or ()).items():
            sys.stdout.write(f"{role}: {python}\n")
