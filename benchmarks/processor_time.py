"""Processor seconds of a command by process, with all that it starts and all that outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAG = "RL_BENCHMARK_TAG"
_TICKS = os.sysconf("SC_CLK_TCK")
_PERIOD_S = 0.05

KINDS = {
    "ray::WorkerHost": "policy ranks",
    "ray::AsyncWorkerHost": "vLLM replica",
    "ray::RestartingHost": "environment",
    "rl_core.fork_server.server": "fork servers",
    "-m rl_core.fork_server": "starts of forks",
    "node_keeper": "Ray",
    "ray::": "Ray",
    "/ray/": "Ray",
    "from rl_core.plugins import resolve": "checks of engines",
    " train ": "driver",
}
"""Words of a command line and the kind of process; the first that fits counts."""


def processor_seconds(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> dict[str, float]:
    """Run a command with its output in a file. Return its processor seconds by kind of process.

    Args:
        command: With its arguments.
        log: For its output, whose end is shown if it fails.
        environ: Variables beside this process's.
    """
    # forks of a server show the variables that the server began with, so the tag is the same for all commands
    variables = {**os.environ, _TAG: "1", **environ}
    before = _seconds_by_process()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
        found: dict[tuple[int, str], tuple[float, str]] = {}
        while process.poll() is None:
            found |= _seconds_by_process()
            time.sleep(_PERIOD_S)
    found |= _seconds_by_process()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    total: Counter[str] = Counter()
    for key, (seconds, title) in found.items():
        total[_kind(title)] += seconds - before.get(key, (0.0, ""))[0]
    return dict(total)


def _kind(title: str) -> str:
    return next((kind for words, kind in KINDS.items() if words in title), "others")


def _seconds_by_process() -> dict[tuple[int, str], tuple[float, str]]:
    """Return the processor seconds and command line of every process with the tag, by its number and start."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{_TAG}=".encode() not in (folder / "environ").read_bytes():
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if title:
            found[int(folder.name), fields[19]] = (int(fields[11]) + int(fields[12])) / _TICKS, title
    return found
