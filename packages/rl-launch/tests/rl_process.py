"""The command `rl` as a process of its own, forked from one that has imported what most of its commands need."""

import os
import subprocess
import sys

from rl_core import fork_server

PYTHON = fork_server.command(sys.executable, ["rl_launch.cli.app", "rl_launch.commands.train"], idle_s=60)
"""What stands in for `python`; none of these modules is an engine or Ray."""

RL = [*PYTHON, "-c", "from rl_launch.cli import main; main()"]


def rl(*arguments, cwd=None, **variables):
    """Run a command with further environment variables; returns its exit code and output."""
    environment = {**os.environ, **variables}
    return subprocess.run([*RL, *arguments], env=environment, capture_output=True, text=True, cwd=cwd, check=False)
