"""Python processes that start with their libraries imported.

Importing torch and an engine takes seconds of processor time, in every process. `python -m rl_core.fork_server` stands
in for `python`: it asks a server that has imported the libraries to fork a process, waits for it, and ends as it ends.
It starts the server if there is none, and runs plain `python` if the server cannot fork.

A server is found by all that an import may depend on (`rl_core.fork_server.request`), so another environment,
user, container or job means another server. It starts over when a file that it has imported changes or a variable that
an import has read, and ends when it has been idle. A terminal's variables do not count, and processes have all
variables of those who start them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

IDLE_S = 600.0
"""Seconds that a server stays without a process."""


def command(python: str, modules: Sequence[str], idle_s: float = IDLE_S) -> list[str]:
    """Return the words that replace `python` at the head of a command that continues with a script or with `-c`.

    Args:
        python: Interpreter that has rl-core.
        modules: Modules to import before forking. They must start no thread, use no GPU and import no Ray: Ray reads
            the variables of a process when it is imported.
        idle_s: Seconds that the server stays without work; 0 to use no server.
    """
    if not modules or not idle_s:
        return [python]
    return [python, "-P", "-m", __name__, f"--import={','.join(modules)}", f"--idle={idle_s:g}", "--"]


def shell_command(python: str, modules: Sequence[str], idle_s: float = IDLE_S) -> str:
    """Return `command`, quoted for a shell."""
    return shlex.join(command(python, modules, idle_s))
