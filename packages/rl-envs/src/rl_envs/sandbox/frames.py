"""Messages on a stream: a header in JSON, and the bytes that follow it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_FRAME = 2**28
"""Most bytes of a message."""


class StreamClosed(ConnectionError):
    """Raised if the other side closed the stream."""


def write(connection: socket.socket, header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Send one message; blocks until the other side has taken it."""
    head = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    size = len(head) + sum(map(len, parts))
    if size > MAX_FRAME:
        raise ValueError(f"a program, its input and its files may have {MAX_FRAME} bytes together, got {size}")
    connection.sendall(b"".join((_LENGTH.pack(len(head)), head, *parts)))


def read(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Receive one message.

    Raises:
        StreamClosed: if the other side closed the stream.
    """
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    header = json.loads(_exactly(connection, min(size, MAX_FRAME)))
    return header, [_exactly(connection, length) for length in header.pop("parts")]


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), 2**20))
        if not chunk:
            raise StreamClosed("the other side closed the stream")
        received += chunk
    return bytes(received)
