"""The connections between the nodes of a replica: they meet, learn the ports of the engine, and end together."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any, NamedTuple

from rl_core.devices.device import hold_port, node_address
from rl_core.errors import GeneratorError

_log = logging.getLogger(__name__)

MEETING_S = 600.0
"""Maximum time in seconds until all nodes of a replica have met."""

RETRY_S = 0.2
"""Time in seconds between two attempts to reach the first node, whose process may still be importing."""

REPORT_S = 2.0
"""Time in seconds within which the loss of a part is reported."""

KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Options by which a connection to a node without power breaks after 25 s."""


class NodePorts(NamedTuple):
    """Ports of the first node, which are kept free for the engine.

    Args:
        ranks: Where the ranks of all nodes meet.
        engines: Where the engines of other nodes meet the process in front of them.
    """

    ranks: int
    engines: int


class FurtherNodes:
    """Connections of the first node of a replica to the processes on its other nodes.

    Args:
        connections: One for each node, by its position and address.
        held: Sockets that keep `ports` free.

    Attributes:
        ports: Ports of the engine.
    """

    def __init__(self, connections: Mapping[str, socket.socket], held: Sequence[socket.socket]) -> None:
        self._connections = dict(connections)
        self._held = held
        self._is_closed = False
        self._failure = ""
        self._lost = Event()
        self.ports = NodePorts(*(each.getsockname()[1] for each in held))

    @classmethod
    def accept(cls, meeting: tuple[str, int], num_nodes: int, timeout_s: float = MEETING_S) -> FurtherNodes:
        """Wait for the other nodes, and tell them the ports.

        Args:
            meeting: Address of this node, and the port that they connect to.
            num_nodes: Number of nodes of the replica.
            timeout_s: Timeout in seconds.

        Raises:
            GeneratorError: If some have not come in time.
        """
        found: dict[str, socket.socket] = {}
        end = time.monotonic() + timeout_s
        with socket.create_server(meeting, family=socket.AF_INET6 if ":" in meeting[0] else socket.AF_INET) as listener:
            while len(found) < num_nodes - 1:
                listener.settimeout(max(0.01, end - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise GeneratorError(
                        f"{num_nodes - 1 - len(found)} of {num_nodes} nodes of the replica did not connect to "
                        f"{meeting[0]}:{meeting[1]} within {timeout_s:g} s. Their logs show the reason; check that "
                        "nodes reach one another on all ports"
                    ) from None
                _keep_alive(connection)
                about = _received(connection)
                if about is None:
                    connection.close()
                    continue
                found[f"node {about['node'] + 1} of {num_nodes} ({about['address']})"] = connection
        further = cls(found, [hold_port(), hold_port()])
        for connection in found.values():
            _send(connection, further.ports._asdict())
        return further

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call a function once, in another thread, when a node is lost or reports that a process of it has ended."""

        def read(name: str, connection: socket.socket) -> None:
            message = _received(connection)
            if self._is_closed or self._failure:
                return
            self._failure = f"{name} of the replica: {message['ended'] if message else 'its process ended'}"
            self._lost.set()
            _log.error("%s; the parts of the replica end", self._failure)
            on_loss()

        for name, connection in self._connections.items():
            Thread(target=read, args=(name, connection), name="further-node", daemon=True).start()

    def failure(self, timeout_s: float = REPORT_S) -> str:
        """Return the first part that was lost, and how it ended; empty if there is none. Ranks of this node may fail
        before it is reported, because they lost their connection to it.

        Args:
            timeout_s: Maximum time in seconds to wait for a report.
        """
        self._lost.wait(timeout_s)
        return self._failure

    def close(self) -> None:
        """Close the connections, which ends the processes of the other nodes."""
        self._is_closed = True
        for each in (*self._connections.values(), *self._held):
            with suppress(OSError):
                # A thread waits for data, so that closing alone would send nothing.
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class FirstNode:
    """The connection of another node of a replica to its first one.

    Args:
        connection: The connection.
        ports: Ports of the engine on the first node.
    """

    def __init__(self, connection: socket.socket, ports: NodePorts) -> None:
        self._connection = connection
        self.ports = ports

    @classmethod
    def find(cls, meeting: tuple[str, int], node: int, timeout_s: float = MEETING_S) -> FirstNode:
        """Connect to the first node, and wait until it has met all nodes.

        Args:
            meeting: Address and port of the first node.
            node: Position of this node.
            timeout_s: Timeout in seconds.

        Raises:
            GeneratorError: If it does not answer in time, or ends.
        """
        end = time.monotonic() + timeout_s
        while True:
            try:
                connection = socket.create_connection(meeting, timeout=max(0.01, end - time.monotonic()))
                break
            except OSError as error:
                if time.monotonic() > end:
                    place = f"{meeting[0]}:{meeting[1]}"
                    reason = f"the first node of the replica ({place}) did not accept a connection: {error}"
                    raise GeneratorError(f"{reason}. Check that nodes reach one another on all ports") from None
                time.sleep(RETRY_S)
        _keep_alive(connection)
        _send(connection, {"node": node, "address": node_address()})
        connection.settimeout(timeout_s)
        ports = _received(connection)
        connection.settimeout(None)
        if ports is None:
            raise GeneratorError("the first node of the replica ended while its nodes met")
        return cls(connection, NodePorts(**ports))

    def report(self, ended: str) -> None:
        """Tell the first node that a process of this node has ended."""
        with suppress(OSError):
            _send(self._connection, {"ended": ended})

    def await_end(self) -> None:
        """Wait until the first node has ended."""
        _received(self._connection)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _received(connection: socket.socket) -> Any:
    """Return the next message; None if the connection has ended."""
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n"):
            read = connection.recv(4096)
            if not read:
                break
            line += read
    return json.loads(line) if line.endswith(b"\n") else None
