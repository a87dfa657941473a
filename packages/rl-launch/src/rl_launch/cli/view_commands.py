"""`rl view`: a page over runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_launch.cli.failure import reported


def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]...",
            help="Runs, evaluations, files of rollouts, or folders that contain them (default: runs).",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for a free one.")] = 0,
    opens_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--export", metavar="DIR", help="Write the page as static files to this folder and exit."),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="With --export: number of steps of each run with rollouts.")
    ] = 8,
    rollouts: Annotated[
        int, typer.Option("--rollouts", min=1, max=500, help="With --export: number of rollouts of each step.")
    ] = 64,
) -> None:
    """Show runs, rollouts and evaluations in a browser: metrics, rollouts, times, advice, configs, logs, checkpoints.

    Serves a read-only page on 127.0.0.1 and prints its address, which contains a token. Runs in progress are followed.
    Reads files only, so a copied folder of a run works too. Ends with Ctrl-C.

    With --export: static files that open from file://, without a server.
    """
    with reported():
        from rl_launch.session.directory.run_folder import RUNS
        from rl_launch.view.catalog import Catalog
        from rl_launch.view.export import export
        from rl_launch.view.index import cache_folder
        from rl_launch.view.server import serve

        catalog = Catalog(paths or [Path(RUNS)], cache_folder())
        if folder is not None:
            count = export(catalog, folder.expanduser(), steps=steps, rollouts=rollouts)
            sys.stdout.write(f"{folder / 'index.html'} ({count} rollouts)\n")
            return

        def say(url: str) -> None:
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()

        serve(catalog, port, say, opens_browser=opens_browser)
