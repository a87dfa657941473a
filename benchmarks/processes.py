"""Processes of a benchmark: the ones that it has started, their sockets and their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def family(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, itself or through a fork server."""
    found = [root]
    with suppress(psutil.Error):
        found += root.children(recursive=True)
    forks = [process for each in found for fork in _forked(each) for process in family(fork)]
    return list(dict.fromkeys([*found, *forks]))


def _forked(process: psutil.Process) -> Iterator[psutil.Process]:
    """Yield processes that a process waits for without being their parent: it has a descriptor of them."""
    for path in Path(f"/proc/{process.pid}/fdinfo").glob("*"):
        with suppress(OSError, psutil.Error):
            facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            if (pid := int(facts.get("Pid", -1))) > 0:
                yield psutil.Process(pid)


def num_sockets(pid: int) -> int:
    """Return the number of sockets that a process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(path))
    return sum(name.startswith("socket:") for name in found)


def resident_mib() -> float:
    """Return the resident memory of this process."""
    return psutil.Process().memory_info().rss / 2**20
