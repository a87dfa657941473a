"""`rl stacks`: stacks of a run in progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_launch.cli.failure import reported


def stacks(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run in progress.")],
    is_native: Annotated[bool, typer.Option("--native", help="Show native frames as well. Requires py-spy.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the stacks of every process of a run in progress: driver, ranks, rollout workers, engines, environments.

    Run it on the machine of the driver. Processes on other nodes are shown if RAY_ADDRESS is set as for the run. The
    stacks are written by C code in each process, so one that hangs in native code is shown too. With py-spy installed
    (rl-launch[profiling]), they also show which thread holds the GIL.

    With --json: {"schema": 1, "processes": [{"name", "pid", "host", "state", "text"}, ...], "missing": [TEXT, ...]}.
    """
    with reported():
        from rl_launch.commands.stacks import stacks_of

        found = stacks_of(path.expanduser(), is_native=is_native)
        sys.stdout.write(json.dumps(found.as_json(), indent=2) if as_json else found.as_text())
        sys.stdout.write("\n")
