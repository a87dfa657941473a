"""Runs one after another in one process and one Ray: most of a short run is their start."""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


class DriverProcess:
    """A process that calls `rl_launch.train` as it is told to, in one Ray.

    Args:
        log: file of what it writes to the terminal.
        cluster: keys of `cluster` by which its Ray differs from that of `sft-arithmetic`.
        variables: further environment variables.
    """

    def __init__(self, log: Path, *cluster: str, **variables: str) -> None:
        self._command = [sys.executable, __file__, *cluster]
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._environment = inherited | variables
        self._log = log
        self._process = self._started()

    def train(self, folder: Path, recipe: str, *overrides: str) -> None:
        """Make a run in a folder, or go on with the one that is there."""
        failure = self.failure_of(folder, recipe, *overrides)
        assert not failure, failure

    def failure_of(self, folder: Path, recipe: str, *overrides: str) -> str:
        """The traceback of a run that is made likewise; empty if all went well."""
        if self._process.poll() is not None:  # its end has failed one test, and need not fail the others
            self._process = self._started()
        self._process.stdin.write(json.dumps([recipe, *overrides, f"run_dir={folder}"]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()
        failure: str = json.loads(answer)
        return failure

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(120) == 0, self._log.read_text()
        self._process.stdout.close()

    def _started(self) -> subprocess.Popen:
        with self._log.open("a") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=self._environment,
            )


def main() -> None:
    """Train by every line of standard input; answer each with a traceback, which is empty if all went well."""
    from rl_launch import train
    from rl_launch.cluster.device import resolve_device
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.run_config.reading import read_plan

    # answers have a pipe of their own: whatever else is printed goes to the log
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    cluster = read_plan("sft-arithmetic", sys.argv[1:]).config.cluster
    with VirtualCluster.of(cluster, resolve_device(cluster)):
        for line in sys.stdin:
            recipe, *overrides = json.loads(line)
            try:
                train(recipe, overrides)
                failure = ""
            except Exception:  # noqa: BLE001  # a failure is the answer
                failure = traceback.format_exc()
            answers.write(json.dumps(failure) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
