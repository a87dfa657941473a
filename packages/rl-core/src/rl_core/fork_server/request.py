"""What a process asks a server for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

_LENGTH = struct.Struct("!Q")
STREAMS = (0, 1, 2)
"""Standard input, output and error, which travel with a request."""


@dataclass(frozen=True)
class Request:
    """A process to fork.

    Args:
        command: A script or `-c CODE`, then arguments.
        variables: Environment variables, all of them.
        directory: Working directory.
        umask: Of the process.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    directory: str
    umask: int

    @classmethod
    def of_this_process(cls, command: Sequence[str]) -> Request:
        """A process that runs a command as this one would."""
        umask = os.umask(0)
        os.umask(umask)
        return cls(list(command), dict(os.environ), os.getcwd(), umask)


def send_request(connection: socket.socket, request: Request) -> None:
    """Send a request with this process's streams."""
    text = json.dumps(asdict(request)).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(text))], STREAMS)
    connection.sendall(text)


def receive_request(connection: socket.socket) -> tuple[Request, list[int]]:
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
    return Request(**json.loads(_exactly(connection, size))), streams


def send_answer(connection: socket.socket, **answer: object) -> None:
    """Send an answer, unless nobody waits for it any more."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def receive_answer(connection: socket.socket) -> dict[str, object]:
    """Receive an answer; empty if the other end has gone."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            byte = connection.recv(1)
        except OSError:
            return {}
        if not byte:
            return {}
        line += byte
    return dict(json.loads(line))


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 2**20))
        if not part:
            raise ConnectionError("a request ended early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
