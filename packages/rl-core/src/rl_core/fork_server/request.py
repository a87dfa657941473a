"""Requests to fork a process, their answers, and the address of the server for a process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import socket
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")
STREAMS = (0, 1, 2)
"""Standard input, output and error, which travel with a request."""

_COUNTING = re.compile(
    # The loader, the interpreter and native libraries read these without Python. Ray sets PYTHONBREAKPOINT in workers.
    "BLIS_|CUDA_|GLIBC_|GOMP_|HSA_|KMP_|LANG|LC_|LD_|MALLOC_|MKL_|NVIDIA_|OMP_|OPENBLAS_|PYTHON(?!BREAKPOINT)|ROCR_|TZ|"
    # These are often set for one job; with an address for each value, its server need not start over.
    "HF_|HUGGINGFACE_|PYTORCH_|TOKENIZERS_|TORCH|TRANSFORMERS_|TRITON_|VLLM_|XDG_CACHE_HOME"
)
"""Beginnings of the environment variables that are part of an address. A server starts over for a request that differs
in any other variable that its imports have read (`rl_core.fork_server.server.Imported`)."""

_MAX_PATH = 107
"""Maximum number of characters in the path of a Unix socket."""


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
        # A job ends all processes of its control group, and a container has its own namespaces.
        Path("/proc/self/cgroup").read_text(),
        sorted(os.readlink(path) for path in Path("/proc/self/ns").iterdir()),
    ]
    name = hashlib.blake2b(json.dumps(everything).encode(), digest_size=12).hexdigest()
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"rl-fork-server-{os.geteuid()}"
    if len(str(folder / name)) > _MAX_PATH:
        return None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_private = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return folder / name if stat.S_ISDIR(found.st_mode) and is_private else None


def connected(address: Path) -> socket.socket | None:
    """Return a connection to the server at an address; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    if connection.connect_ex(str(address)) == 0:
        return connection
    connection.close()
    return None


def send_request(connection: socket.socket, command: Sequence[str]) -> None:
    """Ask for a process that runs a command as this one would, with this process's streams.

    Args:
        connection: Connection to a server.
        command: A script or `-c CODE`, then arguments.
    """
    umask = os.umask(0)
    os.umask(umask)
    request = {"command": list(command), "variables": dict(os.environ), "directory": os.getcwd(), "umask": umask}
    text = json.dumps(request).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(text))], STREAMS)
    connection.sendall(text)


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a request and the descriptors of its streams.

    Raises:
        OSError: If the other end has gone.
    """
    header, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, len(STREAMS))
    if len(header) != _LENGTH.size or len(streams) != len(STREAMS):
        for each in streams:
            os.close(each)
        raise ConnectionError("a request ended early")
    (size,) = _LENGTH.unpack(header)
    with connection.makefile("rb") as file:
        text = file.read(size)
    if len(text) < size:
        raise ConnectionError("a request ended early")
    return json.loads(text), streams


def send_answer(connection: socket.socket, **answer: object) -> None:
    """Send an answer, unless nobody waits for it any more."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def receive_answer(answers: BinaryIO) -> dict[str, Any]:
    """Receive an answer; empty if the other end has gone.

    Args:
        answers: The file of a connection. It is the same for all answers, as it may have read more than one.
    """
    try:
        line = answers.readline()
    except OSError:
        return {}
    return dict(json.loads(line)) if line.endswith(b"\n") else {}
