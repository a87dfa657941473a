"""Messages on a stream: a header in JSON, and the bytes that follow it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_FRAME = 2**28
"""Maximum number of bytes of a message."""


MAX_HEADER = 2**20
"""Maximum number of bytes of a header."""


class MalformedFrame(ConnectionError):
    """Raised if the other side sent something else than a message, or one that is too large."""


class StreamClosed(ConnectionError):
    """Raised if the other side closed the stream."""


def write(connection: socket.socket, header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Send one message; blocks until the other side has taken it."""
    connection.sendall(encoded(header, parts))


def encoded(header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """Return the bytes of one message."""
    head = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    if len(head) > MAX_HEADER:
        raise ValueError(f"a program may have fewer files: their names take {len(head)} bytes, more than {MAX_HEADER}")
    size = len(head) + sum(map(len, parts))
    if size > MAX_FRAME:
        raise ValueError(f"a program, its input and its files may have {MAX_FRAME} bytes together, got {size}")
    return b"".join((_LENGTH.pack(len(head)), head, *parts))


def read(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Receive one message.

    Raises:
        StreamClosed: If the other side closed the stream.
        MalformedFrame: If what came is not a message of at most `MAX_FRAME` bytes.
    """
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > MAX_HEADER:
        raise MalformedFrame(f"a header has at most {MAX_HEADER} bytes, got {size}")
    try:
        header = json.loads(_exactly(connection, size))
    except (ValueError, RecursionError):
        raise MalformedFrame("the header is not JSON") from None
    lengths = header.pop("parts", None) if isinstance(header, dict) else None
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise MalformedFrame("the header does not have the lengths of its parts")
    if size + sum(lengths) > MAX_FRAME:
        raise MalformedFrame(f"a message has at most {MAX_FRAME} bytes, got {size + sum(lengths)}")
    return header, [_exactly(connection, length) for length in lengths]


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), 2**20))
        if not chunk:
            raise StreamClosed("the other side closed the stream")
        received += chunk
    return bytes(received)
