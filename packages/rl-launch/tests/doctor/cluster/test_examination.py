"""Nodes of a real Ray that die or do not answer during a probe. `integration-tests/test_cluster_doctor.py` has whole
examinations.
"""

import os
import signal
import time

from rl_core.devices import CPU
from rl_launch.doctor.cluster.examination import living_nodes
from rl_launch.doctor.cluster.measurements import measure_transfers
from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.probes import Probes


def test_a_node_that_dies_and_one_that_does_not_answer_are_named(machines):
    doomed = machines.add().node_ip_address

    class FailingProbe(NodeProbe):
        def clock(self):
            time.sleep(1000)

        def listen(self):
            if self._address == doomed:
                os.kill(os.getppid(), signal.SIGKILL)  # Ray on this node
                time.sleep(1000)
            return super().listen()

    nodes, silent = living_nodes(CPU), {}
    with Probes(list(nodes.values()), silent, timeout_s=120, probe=FailingProbe) as probes:
        assert set(probes.ask(lambda actor, _: actor.free_port.remote(), "a port")) == set(nodes)
        assert measure_transfers(probes, nodes, seconds=0.1) == ({}, {})
        assert silent == {doomed: "it was lost while waiting for a free port"}
        (late,) = probes.names
        assert not probes.ask(lambda actor, _: actor.clock.remote(), "its clock", timeout_s=0.5)
        assert silent[late] == "it did not answer within 0.5 s while waiting for its clock"
        assert not probes.names
