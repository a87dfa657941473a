"""`rl serve`: commands that serve the models of a recipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_launch.cli.failure import UNFINISHED, reported
from rl_launch.cli.options import Verbose, keys, named, option

app = typer.Typer(no_args_is_help=True)


@app.callback()
def serve() -> None:
    """Serve the models of a recipe to programs that train them."""


@app.command()
def tinker(
    recipe: Annotated[str, named("RECIPE|FILE.yaml", "Name of a recipe, or a YAML file, whose policy is served.")],
    overrides: Annotated[
        list[str] | None, keys("Config keys to set, such as tinker.port=8300 or policy.lora_cfg.dim=32.")
    ] = None,
    resumable: Annotated[
        bool, option("--resumable", "End with exit code 75 instead of 0, by which jobs of a queue are continued.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Serve training steps to programs of the tinker client, until Ctrl-C or SIGTERM.

    Programs set TINKER_BASE_URL to the printed address, and TINKER_API_KEY to a key that begins with tml-. The same
    command continues with the models, requests and checkpoints that are in the run directory.
    """
    with reported() as failure:
        from rl_launch.run_session import show_logs
        from rl_launch.tinker.serving import serve_tinker

        show_logs(verbose=verbose)

        def say(line: str) -> None:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

        serve_tinker(recipe, overrides or (), say, failed_in=lambda folder: setattr(failure, "run_dir", folder))
        if resumable:
            raise typer.Exit(UNFINISHED)
