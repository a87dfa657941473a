"""A check of a sandbox from inside: a program that tries to leave it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.scratch import temporary_folder

_LIMITS = Limits(cpu_s=20.0, wall_s=60.0, processes=8)

_PROBE = """
import ctypes, json, os, socket, sys
bait = json.load(sys.stdin)
breaches = []

def tries(name):
    def run(attempt):
        try:
            attempt()
        except (OSError, ProcessLookupError, RuntimeError):
            return
        breaches.append(name)
    return run

@tries("it reads a file outside its folder")
def read():
    open(bait["file"]).read()

@tries("it writes a file outside its folder")
def write():
    open(bait["file"] + ".written", "w").close()

@tries("it connects to a port of the machine")
def connect():
    socket.create_connection(("127.0.0.1", bait["port"]), timeout=5).close()

@tries("it may send signals to other processes")
def signal():
    os.kill(bait["pid"], 0)

@tries("it sees the machine's processes")
def processes():
    os.listdir(f"/proc/{bait['pid']}")

@tries("it makes a namespace of its own")
def namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError("refused")

if len(os.listdir()) or os.environ.keys() - {"HOME", "TMPDIR", "LANG"}:
    breaches.append("its folder or its environment is not empty")
with open("own", "w") as file:
    file.write("works")
print(json.dumps(breaches))
"""


@contextlib.contextmanager
def bait() -> Iterator[tuple[Program, Limits]]:
    """A program that reports by which ways it got out, and the limits to run it with."""
    with (
        temporary_folder(os.getuid()) as folder,
        socket.create_server(("127.0.0.1", 0)) as port,
    ):
        # what any user of the machine may read and write
        os.chmod(folder, 0o777)
        file = os.path.join(folder, "bait")
        with open(file, "w") as opened:
            opened.write("bait")
        os.chmod(file, 0o666)
        given = {"file": file, "port": port.getsockname()[1], "pid": os.getpid()}
        yield Program(_PROBE, stdin=json.dumps(given).encode()), _LIMITS


def problem(outcome: Outcome, limits: Limits) -> str:
    """By which ways the program got out, or why it could not tell; empty if it is contained."""
    if not outcome.ok:
        return f"a harmless program does not run: {outcome.describe(limits)}"
    return "; ".join(f"a program gets out: {breach}" for breach in json.loads(outcome.stdout))
