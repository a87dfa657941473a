"""The processes of Ray on this machine that the driver depends on."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

import psutil
import ray._private.worker as ray_worker
from ray.exceptions import RayError

RAYLET = "Ray's node process (raylet)"
GCS = "Ray's control service (gcs_server)"
KEEPER = "the parent of Ray's processes (node_keeper)"

_ANSWER_S = 1.0
_CREDENTIALS = "iII"


class LocalRay:
    """The connections of this process to the raylet of its machine, and the processes behind them.

    Ray's library ends a process with exit code 1 and without a message as soon as it uses its connection to a raylet
    that is gone. `mute` puts dead ends in the place of the connections: whoever uses them then waits, so that another
    thread has time to write how the run ended.

    Args:
        started: Processes of a Ray that this process started, by name.
    """

    def __init__(self, started: Mapping[str, psutil.Process]) -> None:
        raylet = _raylet()
        self.processes = {**started, **({RAYLET: raylet} if raylet else {})}
        self.connections = list(_connections_to(raylet.pid)) if raylet else []

    def mute(self) -> None:
        """Replace the connections to the raylet by ones that take what is written and never answer."""
        for connection in self.connections:
            ours, self_held = socket.socketpair()
            os.dup2(ours.fileno(), connection)
            ours.close()
            # stays open as long as the process
            self_held.detach()

    def is_given_up(self) -> bool:
        """Return whether Ray has declared this node dead; False if its control service does not answer in time."""
        worker = ray_worker.global_worker
        try:
            node = worker.core_worker.get_current_node_id()
            return bool(worker.gcs_client.check_alive([node], timeout=_ANSWER_S) == [False])
        except (AttributeError, RayError):
            return False


def state_of(process: psutil.Process) -> str:
    """Return the state of a process as psutil names it; `dead` if it has ended."""
    try:
        state = process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.Error:
        state = psutil.STATUS_DEAD
    return psutil.STATUS_DEAD if state == psutil.STATUS_ZOMBIE else str(state)


def _raylet() -> psutil.Process | None:
    """The process that listens on the socket of this machine's Ray; None if it is not visible here."""
    node = ray_worker._global_node
    if node is None:
        return None
    with suppress(OSError, psutil.Error), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(node.raylet_socket_name)
        return psutil.Process(_peer(probe))
    return None


def _connections_to(pid: int) -> Iterator[int]:
    """Descriptors of this process that are connected to a Unix socket of another."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.family == socket.AF_UNIX and _peer(found) == pid:
                        yield descriptor


def _peer(connected: socket.socket) -> int:
    size = struct.calcsize(_CREDENTIALS)
    return int(struct.unpack(_CREDENTIALS, connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])
