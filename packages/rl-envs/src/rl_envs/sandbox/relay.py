"""The one address outside its sandbox that a program may reach, by a port of its own network that is piped there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from typing import NoReturn

from rl_envs.sandbox.kernel import syscalls

MAX_CONNECTIONS = 32
"""Maximum number of connections of a program at one time; further ones wait."""
CONNECT_TIMEOUT_S = 10.0
"""Maximum number of seconds until the address has accepted a connection."""

BUFFER_BYTES = 2**18
"""Maximum number of bytes of a connection in the memory of the kernel, to be sent or to be received."""

_CHUNK = 2**16
_SIOCSIFFLAGS, _SIOCGIFFLAGS, _IFF_UP = 0x8914, 0x8913, 1


@dataclass(frozen=True)
class Relay:
    """An address that a program may reach, at `127.0.0.1` and the same port of its own network.

    Args:
        host: IP address outside; names are not resolved.
        port: TCP port outside and in the sandbox.
    """

    host: str
    port: int


class RelayProcess:
    """A process in the network of the machine that connects a program's port to one address.

    It is started before the caller leaves that network. `listen` makes the port in the network of the program and
    passes it to this process.

    Args:
        relay: The address.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._control, far = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            _serve(far, relay, parent)
        far.close()

    def listen(self) -> None:
        """Open the port in this process's network, which has nothing else.

        Raises:
            OSError: If the network has no loopback device, or it may not be used.
        """
        with self._control, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as port:
            # A new network starts with its loopback device down.
            request = struct.pack("16sH22x", b"lo", 0)
            (flags,) = struct.unpack_from("H", fcntl.ioctl(port, _SIOCGIFFLAGS, request), 16)
            fcntl.ioctl(port, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
            port.bind(("127.0.0.1", self._relay.port))
            port.listen(MAX_CONNECTIONS)
            socket.send_fds(self._control, [b"p"], [port.fileno()])


def _serve(control: socket.socket, relay: Relay, parent: int) -> NoReturn:
    """Pass connections on until the process is ended with the program."""
    try:
        syscalls.die_with_parent()
        if os.getppid() != parent:
            os._exit(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.stack_size(2**18)
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if descriptors:
            # Only the port is needed of the inherited descriptors.
            os.dup2(descriptors[0], 3)
            os.closerange(4, 2**16)
            syscalls.drop_capabilities()
            syscalls.hide_from_tracers()
            port, room = socket.socket(fileno=3), threading.BoundedSemaphore(MAX_CONNECTIONS)
            while True:
                room.acquire()
                near, _ = port.accept()
                threading.Thread(target=connect, args=(near, relay, room), daemon=True).start()
    finally:
        os._exit(0)


def connect(near: socket.socket, relay: Relay, room: threading.BoundedSemaphore) -> None:
    """Connect a program's connection to its address until both ends are closed, and release its place in the room."""
    try:
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection((relay.host, relay.port), CONNECT_TIMEOUT_S) as far,
        ):
            far.settimeout(None)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                far.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES // 2)  # The kernel doubles it.
            back = threading.Thread(target=_pipe, args=(far, near), daemon=True)
            back.start()
            _pipe(near, far)
            back.join()
    finally:
        room.release()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    """Copy a stream to its end; an error ends both directions."""
    try:
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
