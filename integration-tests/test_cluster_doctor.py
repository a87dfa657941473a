"""`rl doctor --cluster` on Ray nodes of this machine, of which one has a folder of its own, is slow, or dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from logical_cluster import LogicalCluster

from rl_core.testing.exhaustive import exhaustive
from rl_launch.doctor.cluster.examination import examine_cluster
from rl_launch.doctor.cluster.node_probe import NodeProbe

SO_MAX_PACING_RATE = 47
ON_CPU = ("sft-arithmetic", "cluster.device=cpu", "cluster.cpu_ranks_per_node=1")

pytestmark = pytest.mark.timeout(900)  # nodes of Ray, and torch on each, share the cores of one machine


@pytest.fixture
def cluster(tmp_path):
    with LogicalCluster(tmp_path / "ray") as nodes:
        yield nodes


@exhaustive
def test_a_node_that_does_not_see_the_run_directory_is_named_and_all_ranks_are_measured(cluster, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    cluster.add()
    unshared = cluster.add(hides=[folder])
    command = [str(Path(sys.executable).with_name("rl")), "doctor", "--cluster", *ON_CPU]
    found = subprocess.run(
        [*command, "cluster.num_nodes=2", "--timeout=120", f"run_dir={folder}/run"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    assert f"missing  run directory on {unshared.address}: {folder}: it does not exist" in found.stdout
    assert "ok       ports:" in found.stdout
    assert "by gloo over 2 ranks on 2 nodes" in found.stdout
    assert not list(folder.iterdir())
    left = [node.runs("ray::NodeProbe") or node.runs("rl_core.torch.all_reduce") for node in cluster.nodes]
    assert not any(left)


@exhaustive
def test_a_node_that_sends_slowly_and_one_that_dies_meanwhile_are_named(cluster, tmp_path, monkeypatch):
    cluster.add()
    slow, _, doomed = (cluster.add().address for _ in range(3))

    class FailingProbe(NodeProbe):
        def connect(self, address, port):
            connection = super().connect(address, port)
            if self._address == slow:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 200_000)
            return connection

        def listen(self):
            if self._address == doomed:
                os.kill(os.getppid(), signal.SIGKILL)  # Ray on this node
                time.sleep(1000)
            return super().listen()

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    keys = [*ON_CPU[1:], "cluster.num_nodes=3", "cluster.worker_envs=isolated", f"run_dir={tmp_path}/run"]
    found = examine_cluster(ON_CPU[0], keys, timeout_s=120, transfer_s=0.1, probe=FailingProbe)
    said = {finding.name: finding for finding in found.report.findings}
    assert "sends at" in said[f"bandwidth of {slow}"].found
    assert said["run directory"].status == "ok"
    assert "not built" in said["all-reduce"].found
    assert said[f"node {doomed}"].found == "it was lost while waiting for a free port"
    assert len(found.survey.clocks) == 4
    assert len(found.survey.rates) == 6
