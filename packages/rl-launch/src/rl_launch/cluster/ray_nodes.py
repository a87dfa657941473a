"""Ray nodes that a run starts for itself on this machine."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import psutil
import ray
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER

from rl_core.errors import ConfigError, RLError
from rl_launch.cluster import setup_worker
from rl_launch.cluster.local_gpus import local_gpus
from rl_launch.cluster.local_ray import GCS, KEEPER
from rl_launch.cluster.ray_folder import prepare_ray_folder
from rl_launch.cluster.ray_start import UNREACHABLE
from rl_launch.cluster.ray_token import secure_new_cluster
from rl_launch.cluster.start_wait import REPORT_S, busy

_log = logging.getLogger(__name__)

FIRST_ADDRESS = 2
"""Last byte of the first address in 127.0.0.0/8; Ray replaces 127.0.0.1 by an address of the machine."""

MOST_NODES = 32
"""Ray's own processes take about 0.2 GiB for each node."""

LEAST_OBJECT_STORE_BYTES = 80 * 2**20

START_TIMEOUT_S = 300.0
"""Default maximum time in seconds for nodes to start."""

CLOSE_TIMEOUT_S = 60.0
"""Maximum time in seconds for nodes to stop before they are killed."""

_OF_HEAD = {
    "include_dashboard": False,
    # tails the workers' output for drivers that print it
    "include_log_monitor": False,
    # the autoscaler
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
        nodes: Settings of each, as `ray.cluster_utils.Cluster.add_node` takes them; the first is the head.
        timeout_s: Bound of their start in seconds.

    Raises:
        ConfigError: If Ray cannot start with its folder where it is.
        RLError: If a node does not start.
    """

    def __init__(self, nodes: Sequence[Mapping[str, Any]], timeout_s: float = START_TIMEOUT_S) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        secure_new_cluster()
        folder = prepare_ray_folder()
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "rl_launch.cluster.node_keeper", json.dumps(list(nodes))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_TMPDIR": str(folder)},
            start_new_session=True,
        )
        self._started: list[psutil.Process] = []
        try:
            self.address = self._answer(timeout_s)
            self._started = psutil.Process(self._keeper.pid).children(recursive=True)
        except BaseException:
            # what does not start need not end in order
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
        """Kill the keeper and all nodes, whatever state they are in."""
        self._keeper.kill()
        # the kernel ends a raylet with the keeper, and a raylet's agents notice its end minutes later
        for each in self._started:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def processes(self) -> dict[str, psutil.Process]:
        """The keeper, and the service that knows all nodes, by name."""
        services = [each for each in self._started if each.is_running() and PROCESS_TYPE_GCS_SERVER in each.name()]
        return {KEEPER: psutil.Process(self._keeper.pid), **({GCS: services[0]} if services else {})}

    def _answer(self, timeout_s: float) -> str:
        """The address at which the nodes meet."""
        assert self._keeper.stdout is not None
        with self._keeper.stdout as answers:
            self._await(answers, timeout_s)
            text = answers.read()
        if not text:
            raise RLError(f"Ray did not start: its parent process ended with exit code {self._keeper.wait()}")
        answer = json.loads(text)
        if "problem" in answer:
            raise RLError(answer["problem"])
        return str(answer["address"])

    @staticmethod
    def _await(answers: IO[bytes], timeout_s: float) -> None:
        begun = time.monotonic()
        while not select.select([answers], [], [], max(0.0, min(REPORT_S, begun + timeout_s - time.monotonic())))[0]:
            waited = time.monotonic() - begun
            if waited >= timeout_s:
                raise RLError(
                    f"Ray did not start within {timeout_s:g} s (cluster.process_timeout_s). {UNREACHABLE}{busy()}"
                )
            _log.info("still waiting for Ray to start after %.0f s%s", waited, busy())


def one_node(num_cpus: int) -> list[dict[str, Any]]:
    """Settings of a Ray on this machine, with at least this many CPUs."""
    return [
        {
            "num_cpus": max(os.cpu_count() or 1, num_cpus),
            "num_gpus": local_gpus(),
            "object_store_memory": object_store_bytes(),
            **_OF_NODE,
            **_OF_HEAD,
        }
    ]


def logical_nodes(num_nodes: int, gpus_per_node: int) -> list[dict[str, Any]]:
    """Return the settings of nodes that each have their own address and number of logical GPUs.

    Raises:
        ConfigError: If there are more nodes than one machine can hold.
    """
    if num_nodes > MOST_NODES:
        raise ConfigError(
            f"cluster.num_nodes is {num_nodes}, but a rehearsal has at most {MOST_NODES} nodes on one machine; "
            "lower it, or set RAY_ADDRESS to a cluster whose nodes have logical GPUs"
        )
    _log.info("starting %d Ray nodes with %d logical GPUs each", num_nodes, gpus_per_node)
    settings = {
        # bundles take a CPU for each GPU; environments and tasks take further ones
        "num_cpus": 2 * gpus_per_node + (os.cpu_count() or 1),
        "num_gpus": gpus_per_node,
        "object_store_memory": max(LEAST_OBJECT_STORE_BYTES, object_store_bytes() // num_nodes),
        **_OF_NODE,
    }
    nodes = [{**settings, "node_ip_address": f"127.0.0.{FIRST_ADDRESS + node}"} for node in range(num_nodes)]
    return [{**nodes[0], **_OF_HEAD}, *nodes[1:]]


def is_on_this_machine_alone() -> bool:
    """Return whether this process started the Ray that it is connected to, which then has no other node."""
    return ray.get_runtime_context().gcs_address in _started


def object_store_bytes() -> int:
    """Memory for all object stores of this machine together."""
    shared = os.statvfs("/dev/shm")
    free = shared.f_bavail * shared.f_frsize
    return int(max(80 * 2**20, min(0.3 * free, 64 * 2**30)))
