"""Clusters of real nodes of Ray, on this machine, some of which are made slow, silent or dead by their probes; a path
under /proc/self/cwd is seen by the driver alone.
"""

import os
import signal
import socket
import time

import psutil
import pytest

from rl_core.devices import CPU
from rl_launch.doctor.cluster.examination import examine_cluster, living_nodes
from rl_launch.doctor.cluster.measurements import measure_transfers
from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.probes import Probes

SO_MAX_PACING_RATE = 47
NODES = ("cluster.device=cpu", "cluster.num_nodes=3", "cluster.cpu_ranks_per_node=1")


@pytest.fixture(scope="module")
def pair(machines):
    """Two nodes beside the driver's."""
    return machines.add(), machines.add()


def by_name(found):
    return {finding.name: finding for finding in found.report.findings}


def sending_slowly(address):
    class SlowProbe(NodeProbe):
        def connect(self, other, port):
            connection = super().connect(other, port)
            if self._address == address:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 200_000)
            return connection

    return SlowProbe


def test_a_slow_node_and_nodes_with_folders_of_their_own_are_named_and_the_others_measured(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow, other = (node.node_ip_address for node in pair)
    found = examine_cluster(
        "sft-arithmetic",
        [*NODES, "run_dir=/proc/self/cwd/runs/one"],
        timeout_s=120,
        transfer_s=0.1,
        probe=sending_slowly(slow),
    )
    said = by_name(found)
    assert f"bandwidth of {slow}" in said
    assert "sends at" in said[f"bandwidth of {slow}"].found
    assert said[f"run directory on {slow}, {other}"].status == "missing", sorted(said)
    assert said["ports"].status == "ok"
    assert said["all-reduce"].status == "ok"
    assert "by gloo over 3 ranks on 3 nodes" in said["all-reduce"].found
    assert not found.report.can_run
    assert len(found.survey.clocks) == 3
    assert not list(tmp_path.iterdir())
    deadline = time.monotonic() + 60
    while left := [each for each in psutil.process_iter() if is_left(each)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_left(process):
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "ray::SlowProbe" in command or "rl_core.torch.all_reduce" in command


def test_a_node_that_does_not_answer_and_one_that_dies_are_named_and_the_others_go_on(pair):
    late, doomed = (node.node_ip_address for node in pair)

    class FailingProbe(NodeProbe):
        def clock(self):
            if self._address == late:
                time.sleep(1000)
            return super().clock()

        def listen(self):
            if self._address == doomed:
                os.kill(os.getppid(), signal.SIGKILL)  # Ray on this node
                time.sleep(1000)
            return super().listen()

    nodes, silent = living_nodes(CPU), {}
    drivers, *others = nodes
    assert others == [late, doomed]
    with Probes(list(nodes.values()), silent, timeout_s=120, probe=FailingProbe) as probes:
        assert set(probes.ask(lambda actor, _: actor.free_port.remote(), "a port")) == set(nodes)
        assert not probes.ask(lambda actor, _: actor.clock.remote(), "its clock", [late], timeout_s=0.5)
        assert silent == {late: "it did not answer within 0.5 s while waiting for its clock"}
        assert measure_transfers(probes, nodes, seconds=0.1) == ({}, {})
        assert silent[doomed] == "it was lost while waiting for a free port"
        assert list(probes.clocks()) == [drivers]
