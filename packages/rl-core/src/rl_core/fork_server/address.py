"""Where the server for a process is found."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_COUNTING = re.compile(
    # read by the loader, the interpreter and native libraries, unseen by Python; Ray sets PYTHONBREAKPOINT in workers
    "BLIS_|CUDA_|GLIBC_|GOMP_|HSA_|KMP_|LANG|LC_|LD_|MALLOC_|MKL_|NVIDIA_|OMP_|OPENBLAS_|PYTHON(?!BREAKPOINT)|ROCR_|TZ|"
    # often set for one job: with an address for each value, its server need not start over
    "HF_|HUGGINGFACE_|PYTORCH_|TOKENIZERS_|TORCH|TRANSFORMERS_|TRITON_|VLLM_|XDG_CACHE_HOME"
)
"""Beginnings of the environment variables that are part of an address. A server starts over for a request that differs
in any other variable that its imports have read (`rl_core.fork_server.loaded.Imported`)."""

_LONGEST_PATH = 107
"""Of a Unix socket."""


def server_address(modules: Sequence[str], variables: Mapping[str, str]) -> Path | None:
    """Return the socket of the server that forks processes with these modules for this one.

    A server whose imports read other values of other variables starts over when it is asked.

    Args:
        modules: Imported by the server.
        variables: Environment variables of this process.

    Returns:
        A path in a folder that only this user enters; None if there can be no such folder.
    """
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    everything = [
        [sys.executable, os.path.realpath(sys.executable), sys.flags, modules],
        sorted(item for item in variables.items() if _COUNTING.match(item[0])),
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


def _is_private(folder: Path) -> bool:
    """Return whether only this user enters a folder, which is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
