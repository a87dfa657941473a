"""Where the server for a process is found."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_OF_ONE_PROCESS = frozenset(
    {
        "_",
        "COLUMNS",
        "GLOO_SOCKET_IFNAME",
        "LINES",
        "NCCL_SOCKET_IFNAME",
        "OLDPWD",
        "PATH",
        "PWD",
        "PYTHONBREAKPOINT",
        "SHLVL",
    }
)
"""Variables that differ between processes and that no library reads when it is imported, except that torch looks for
CUDA's compiler in `PATH`: processes with GPUs have no server. All others count, but those of `_OF_ONE_PROGRAM`."""

_OF_ONE_PROGRAM = ("CRC32C_", "JPY_", "PYTEST_", "RAY_", "RL_", "SPT_")
"""Prefixes of variables that only one program reads. A server never imports it (TensorBoard's writer, Jupyter, pytest,
Ray, setproctitle), or it reads them when it is called (this project)."""

_LONGEST_PATH = 107
"""Of a Unix socket."""


def server_address(modules: Sequence[str], variables: Mapping[str, str]) -> Path | None:
    """Return the socket of the server whose processes are as this one would be with the modules imported.

    Args:
        modules: Imported by the server.
        variables: Environment variables of this process.

    Returns:
        A path in a folder that only this user enters; None if there can be no such folder.
    """
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    everything = [
        [sys.executable, os.path.realpath(sys.executable), sys.flags, modules],
        sorted(item for item in variables.items() if _counts(item[0])),
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        [sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)],
        [os.geteuid(), os.getegid(), sorted(os.getgroups())],
        # of a job, which ends all that it holds, and of a container
        Path("/proc/self/cgroup").read_text(),
        sorted(os.readlink(path) for path in Path("/proc/self/ns").iterdir()),
    ]
    name = hashlib.blake2b(json.dumps(everything).encode(), digest_size=12).hexdigest()
    path = Path(os.environ.get("TMPDIR") or "/tmp") / f"rl-fork-server-{os.geteuid()}" / name
    return path if len(str(path)) <= _LONGEST_PATH and _is_private(path.parent) else None


def connected(address: Path) -> socket.socket | None:
    """A connection to the server at an address; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    if connection.connect_ex(str(address)) == 0:
        return connection
    connection.close()
    return None


def _counts(variable: str) -> bool:
    return variable not in _OF_ONE_PROCESS and not variable.startswith(_OF_ONE_PROGRAM)


def _is_private(folder: Path) -> bool:
    """Return whether only this user enters a folder, which is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
