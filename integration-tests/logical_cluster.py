"""A Ray cluster of logical nodes for tests of faults: each is a process group of this machine with its own address."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from runs import described, family

from rl_core.selfcheck.rank_pool import free_port

SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_AUTH_MODE": "disabled",
    "RAY_prestart_worker_first_driver": "0",
}
"""Settings by which Ray's head notices a dead node in seconds, admits every process of the machine, and starts none for
nothing."""

START_ATTEMPTS = 3
"""Attempts to start a node: Ray misses its own fixed deadline on a busy machine."""


@dataclass
class LogicalNode:
    """A node, with all the processes that Ray starts there."""

    address: str
    process: subprocess.Popen = field(repr=False)

    def processes(self):
        if self.process.poll() is not None:
            return []
        return family(psutil.Process(self.process.pid))

    def runs(self, words):
        """Whether the title of one of its processes has these words."""
        return any(words in described(each) for each in self.processes())

    def kill(self):
        """Kill all its processes, as if the machine lost power."""
        found = self.processes()
        for each in found:
            with suppress(psutil.NoSuchProcess):  # others end it as soon as the first are gone
                each.kill()
        psutil.wait_procs(found, 30)
        self.process.wait(30)


class LogicalCluster:
    """Nodes with GPUs that exist only for Ray.

    Args:
        folder: for Ray's files.
        prefix: words in front of the command of each node.
    """

    def __init__(self, folder, prefix=()):
        self._folder = folder
        self._prefix = prefix
        self._exit = ExitStack()
        self._port = free_port()
        self.nodes = []

    @property
    def address(self):
        """Address for `RAY_ADDRESS`."""
        return f"{self.nodes[0].address}:{self._port}"

    def add(self, *, num_gpus=4, hides=(), **variables):
        """Start a further node, the first of which is the head.

        Args:
            num_gpus: GPUs that it reports.
            hides: folders that are empty for its processes.
            variables: environment variables of its processes.
        """
        number = len(self.nodes)
        address = f"127.0.0.{40 + number}"
        role = ["--head", f"--port={self._port}", "--include-dashboard=false"]
        if self.nodes:
            role = [f"--address={self.address}"]
        ray = Path(sys.executable).with_name("ray")
        command = [
            *(str(ray), "start", "--block", "--disable-usage-stats", *role),
            *(f"--node-ip-address={address}", f"--num-gpus={num_gpus}", "--num-cpus=16"),
            f"--object-store-memory={100 * 2**20}",
        ]
        if hides:
            mounts = " && ".join(f"mount -t tmpfs tmpfs '{path}'" for path in hides)
            command = [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                f'{mounts} && exec "$@"',
                "sh",
                *command,
            ]
        command = [*self._prefix, *command]
        self._folder.mkdir(exist_ok=True)
        environment = {**os.environ, **SETTINGS, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", **variables}
        for attempt in range(START_ATTEMPTS):
            path = self._folder / f"node-{number}-{attempt}.log"
            with path.open("w") as log:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            node = LogicalNode(address, process)
            self._exit.callback(node.kill)
            if self._runs(node, path):
                self.nodes.append(node)
                return node
        raise AssertionError(path.read_text())

    def kill_one(self, words):
        """Kill a process of any node by words of its title."""
        found = [each for node in self.nodes for each in node.processes() if words in described(each)]
        assert found, f"no node runs {words}"
        found[0].kill()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._exit.close()

    @staticmethod
    def _runs(node, log, timeout=180):
        """Whether it has started; Ray itself gives up after 30 s."""
        deadline = time.monotonic() + timeout
        while "--block" not in log.read_text():
            if node.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return True
