"""Processes of agents, ended with everything that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "RL_ROLLOUT"
"""Environment variable that all processes of a rollout have; its value is that of no other rollout."""

_POLL_S = 0.02
_LAST_LINES = 3
_LAST_BYTES = 4096


def processes_of(session: int, mark: str) -> Iterator[int]:
    """Yield the processes of a rollout: those of its session, and those that left it, which still have its mark.

    Args:
        session: Id of the session, that of the process which the rollout began with.
        mark: Value of `MARK` in the variables of the processes that it started.
    """
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError, IndexError):
            # after the name, which is in parentheses: state, parent, group, session
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            is_own = int(its_session) == session or wanted in (folder / "environ").read_bytes().split(b"\0")
            if is_own and state != "Z":
                yield int(folder.name)


async def end_all(session: int, mark: str, grace_s: float) -> None:
    """End all processes of a rollout: ask them to end, and kill those that have not after a while.

    Args:
        session, mark: As in `processes_of`.
        grace_s: Seconds that they have to end by themselves.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(processes_of(session, mark)):
        await asyncio.sleep(_POLL_S)
    # one that forks while it is looked for is found by the next look
    while left := list(processes_of(session, mark)):
        for each in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        await asyncio.sleep(_POLL_S)


def last_lines(log: Path) -> str:
    """Return the last lines of a log in one; empty if there is none."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
    return ""
