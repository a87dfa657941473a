"""Ray nodes that a run starts for itself on this machine, and the processes of Ray that the driver depends on."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
import ray._private.worker as ray_worker
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER
from ray.exceptions import RayError

from rl_core.errors import ConfigError, RLError
from rl_launch.cluster import setup_worker
from rl_launch.cluster.machine import local_gpus
from rl_launch.cluster.ray_files import prepare_ray_folder
from rl_launch.cluster.ray_start import UNREACHABLE, secure_new_cluster
from rl_launch.cluster.start_wait import REPORT_S, busy

_log = logging.getLogger(__name__)

FIRST_ADDRESS = 2
"""Last byte of the first address in 127.0.0.0/8; Ray replaces 127.0.0.1 by an address of the machine."""

MAX_NODES = 32
"""Ray's own processes take about 0.2 GiB for each node."""

MIN_OBJECT_STORE_BYTES = 80 * 2**20

RAYLET = "Ray's node process (raylet)"
GCS = "Ray's control service (gcs_server)"
KEEPER = "the parent of Ray's processes (node_keeper)"

_ANSWER_S = 1.0
_CREDENTIALS = "iII"

START_TIMEOUT_S = 300.0
"""Default maximum time in seconds for nodes to start."""

CLOSE_TIMEOUT_S = 60.0
"""Maximum time in seconds for nodes to stop before they are killed."""

_OF_HEAD = {
    "include_dashboard": False,
    # The log monitor tails the workers' output for drivers that print it.
    "include_log_monitor": False,
    # The monitor is the autoscaler.
    "no_monitor": True,
    "_system_config": {"prestart_worker_first_driver": False},
}
"""No process that a local run does not need, and no idle Python for each CPU: workers have their own interpreters."""

_OF_NODE = {"setup_worker_path": setup_worker.__file__}
"""Starts workers in half the time."""

_started: set[str] = set()
"""Addresses of the Rays of one node that this process started."""


class RayNodes:
    """Ray nodes on this machine, which end with this object and with the process that made it.

    Their keeper (`node_keeper`) and they are in their own session: a signal to the driver's process group
    (`timeout`, Slurm, Ctrl-C in a terminal) reaches only the driver, which ends Ray when it has saved. If the driver
    dies, its keeper ends, and the kernel ends Ray's processes with the keeper.

    Args:
        nodes: Settings of each, for `ray.cluster_utils.Cluster.add_node`; the first is the head.
        timeout_s: Limit of their start in seconds.

    Raises:
        ConfigError: If Ray cannot start with its folder where it is.
        RLError: If a node does not start.
    """

    def __init__(self, nodes: Sequence[Mapping[str, Any]], timeout_s: float = START_TIMEOUT_S) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        secure_new_cluster()
        folder = prepare_ray_folder()
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "rl_launch.cluster.node_keeper", json.dumps(list(nodes)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_TMPDIR": str(folder)},
            start_new_session=True,
        )
        self._started: list[psutil.Process] = []
        self._killer: subprocess.Popen[bytes] | None = None
        try:
            self.address = self._answer(timeout_s)
            self._started = psutil.Process(self._keeper.pid).children(recursive=True)
        except BaseException:
            # Nodes that do not start need not end in order.
            self.kill()
            self.close()
            raise
        if len(nodes) == 1:
            _started.add(self.address)

    def close(self) -> None:
        """End all nodes. May be called again."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def kill(self) -> None:
        """Kill the keeper and all nodes in any state."""
        self._keeper.kill()
        # The kernel ends a raylet with the keeper, and a raylet's agents notice its end minutes later.
        for each in self._started:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def kill_afterwards(self) -> None:
        """Have the keeper and all nodes killed as soon as this process has ended.

        A thread of this process that reads from a raylet when it is killed would end it with an exit code of Ray's own.
        """
        pids = [str(each) for each in (self._keeper.pid, *(process.pid for process in self._started))]
        script = 'read _; kill -9 "$@"'
        # Its standard input ends with this process, which keeps it open until then.
        self._killer = subprocess.Popen(
            ["sh", "-c", script, "sh", *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def processes(self) -> dict[str, psutil.Process]:
        """Return the keeper, and the service that knows all nodes, by name."""
        services = [each for each in self._started if each.is_running() and PROCESS_TYPE_GCS_SERVER in each.name()]
        return {KEEPER: psutil.Process(self._keeper.pid), **({GCS: services[0]} if services else {})}

    def _answer(self, timeout_s: float) -> str:
        """Return the address where the nodes meet."""
        assert self._keeper.stdout is not None
        with self._keeper.stdout as answers:
            begun = time.monotonic()
            end = begun + timeout_s
            while not select.select([answers], [], [], max(0.0, min(REPORT_S, end - time.monotonic())))[0]:
                waited = time.monotonic() - begun
                if waited >= timeout_s:
                    limit = f"{timeout_s:g} s (cluster.process_timeout_s)"
                    raise RLError(f"Ray did not start within {limit}. {UNREACHABLE}{busy()}")
                _log.info("still waiting for Ray to start after %.0f s%s", waited, busy())
            text = answers.read()
        if not text:
            raise RLError(f"Ray did not start: its parent process ended with exit code {self._keeper.wait()}")
        answer = json.loads(text)
        if "problem" in answer:
            raise RLError(answer["problem"])
        return str(answer["address"])


def one_node(num_cpus: int) -> list[dict[str, Any]]:
    """Return the settings of a Ray on this machine, with at least this many CPUs."""
    resources = {"num_cpus": max(os.cpu_count() or 1, num_cpus), "num_gpus": local_gpus()}
    return [{**resources, "object_store_memory": object_store_bytes(), **_OF_NODE, **_OF_HEAD}]


def logical_nodes(num_nodes: int, gpus_per_node: int) -> list[dict[str, Any]]:
    """Return the settings of nodes that each have their own address and number of logical GPUs.

    Raises:
        ConfigError: If there are more nodes than one machine can hold.
    """
    if num_nodes > MAX_NODES:
        problem = f"cluster.num_nodes is {num_nodes}, but a rehearsal has at most {MAX_NODES} nodes on one machine"
        raise ConfigError(f"{problem}; lower it, or set RAY_ADDRESS to a cluster whose nodes have logical GPUs")
    _log.info("starting %d Ray nodes with %d logical GPUs each", num_nodes, gpus_per_node)
    settings = {
        # Bundles take a CPU for each GPU; environments and tasks take further ones.
        "num_cpus": 2 * gpus_per_node + (os.cpu_count() or 1),
        "num_gpus": gpus_per_node,
        "object_store_memory": max(MIN_OBJECT_STORE_BYTES, object_store_bytes() // num_nodes),
        **_OF_NODE,
    }
    nodes = [{**settings, "node_ip_address": f"127.0.0.{FIRST_ADDRESS + node}"} for node in range(num_nodes)]
    return [{**nodes[0], **_OF_HEAD}, *nodes[1:]]


def is_on_this_machine_alone() -> bool:
    """Return whether this process started the Ray that it is connected to, which then has no other node."""
    return ray.get_runtime_context().gcs_address in _started


def object_store_bytes() -> int:
    """Return the memory for all object stores of this machine together."""
    shared = os.statvfs("/dev/shm")
    free = shared.f_bavail * shared.f_frsize
    return int(max(MIN_OBJECT_STORE_BYTES, min(0.3 * free, 64 * 2**30)))


class LocalRay:
    """The connections of this process to the raylet of its machine, and Ray's processes.

    Ray's library ends a process with exit code 1 and without a message as soon as it uses its connection to a raylet
    that is gone. `mute` puts dead ends in the place of the connections: a thread that uses them waits, so that another
    thread has time to write how the run ended.

    Args:
        started: Processes of a Ray that this process started, by name.
    """

    def __init__(self, started: Mapping[str, psutil.Process]) -> None:
        raylet = _raylet()
        self.processes = {**started, **({RAYLET: raylet} if raylet else {})}
        self.connections = list(_connections_to(raylet.pid)) if raylet else []

    def mute(self) -> None:
        """Replace the connections to the raylet by ones that accept data and never answer."""
        for connection in self.connections:
            ours, self_held = socket.socketpair()
            os.dup2(ours.fileno(), connection)
            ours.close()
            # This end stays open as long as the process.
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
    """Return the state of a process in the words of psutil; `dead` if it has ended."""
    try:
        state = process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.Error:
        state = psutil.STATUS_DEAD
    return psutil.STATUS_DEAD if state == psutil.STATUS_ZOMBIE else str(state)


def _raylet() -> psutil.Process | None:
    """Return the process that listens on the socket of this machine's Ray; None if it is not visible here."""
    node = ray_worker._global_node
    if node is None:
        return None
    with suppress(OSError, psutil.Error), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(node.raylet_socket_name)
        return psutil.Process(_peer(probe))
    return None


def _connections_to(pid: int) -> Iterator[int]:
    """Yield the descriptors of this process that are connected to a Unix socket of another."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.family == socket.AF_UNIX and _peer(found) == pid:
                        yield descriptor


def _peer(connected: socket.socket) -> int:
    size = struct.calcsize(_CREDENTIALS)
    return int(struct.unpack(_CREDENTIALS, connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])
