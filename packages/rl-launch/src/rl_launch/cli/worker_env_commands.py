"""`rl worker-envs`: the environments of a recipe's workers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_launch.cli.completion import complete_override, complete_recipe
from rl_launch.cli.failure import reported


def worker_envs(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE.yaml|RUN",
            help="The recipe whose workers they are for.",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to set.", autocompletion=complete_override),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option("--role", metavar="ROLE", help="Only this role, such as policy, generation or env.math."),
    ] = None,
) -> None:
    """Build the Python environments of a recipe's workers, as a run does before it starts, and print the interpreter of
    each role.

    Use it in an image, or on a node before a run. With cluster.device=cuda it builds the environments for GPUs on any
    machine. They are kept under RL_HOME.
    """
    with reported():
        from rl_launch.commands.worker_envs import build_worker_envs
        from rl_launch.session import show_logs

        show_logs()
        for role, python in build_worker_envs(recipe, overrides or (), roles=roles or ()).items():
            sys.stdout.write(f"{role}: {python}\n")
