"""`python -m rl_core.fork_server --import=MODULES --idle=SECONDS -- SCRIPT ...`: `python SCRIPT ...`, forked."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from rl_core.fork_server.request import connected, receive_answer, send_request, server_address

_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_IMPORT_S = 300.0
"""Timeout in seconds of the wait until a server that listens has imported its modules."""

_SERVER = """\
import sys
del sys.path[0]
from rl_core.fork_server.server import main
main(sys.argv[1], sys.argv[2].split(","), float(sys.argv[3]))
"""


def main() -> None:
    """Run the command of this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--import", dest="modules", required=True)
    parser.add_argument("--idle", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    status = _forked(command, chosen.modules, chosen.idle)
    if status is None:
        os.execv(sys.executable, [sys.executable, *command])
    if status >= 0:
        sys.exit(status)
    # This process ends by the same signal. The handler of SIGKILL cannot be set.
    with suppress(OSError):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


def _forked(command: list[str], modules: str, idle: str) -> int | None:
    """Run a command in a fork of a server, and return its exit status, negative for the signal that ended it; None if
    no server could run it."""
    address = server_address(modules.split(","), os.environ)
    if address is None:
        return None
    # A server that is out of date refuses, and makes way for another.
    for _ in range(2):
        connection = _server(address, modules, idle)
        if connection is None:
            return None
        with connection, connection.makefile("rb") as answers:
            try:
                send_request(connection, command)
                connection.settimeout(_IMPORT_S)
                answer = receive_answer(answers)
            except OSError:
                return None
            connection.settimeout(None)
            if "pid" in answer:
                return _wait(answer["pid"], answers)
        if answer.get("refusal"):
            sys.stderr.write(f"started without the fork server: {answer['refusal']}\n")
            return None
    return None


def _server(address: Path, modules: str, idle: str) -> socket.socket | None:
    """Return a connection to the server, which is started unless it runs."""
    if (connection := connected(address)) is not None:
        return connection
    # The call returns once the server, or another one that was faster, listens.
    started = subprocess.run(
        [sys.executable, "-c", _SERVER, str(address), modules, idle],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )
    return connected(address) if started.returncode == 0 else None


def _wait(pid: int, answers: BinaryIO) -> int:
    """Wait for a forked process, forward signals to it, and return its exit status."""

    def forward(number: int, frame: FrameType | None) -> None:
        signal.pidfd_send_signal(process, number)

    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        for each in _FORWARDED:
            signal.signal(each, forward)
        # The descriptor is readable when the process has ended.
        select.select([process], [], [])
    # The server reports the status, unless it has died.
    return int(receive_answer(answers).get("status", 1))


if __name__ == "__main__":
    main()
