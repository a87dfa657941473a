"""Transfers between probes without Ray, in threads: addresses of this machine stand for nodes, of which one is slow."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rl_core.devices import CPU
from rl_launch.doctor.cluster.judgement import blame
from rl_launch.doctor.cluster.measurements import measure_all_reduce, measure_transfers
from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.survey import ClusterNode

SO_MAX_PACING_RATE = 47
NAMES = ["n2", "n3", "n4", "n5"]
SLOW = "n4"


class Probe(NodeProbe):
    def connect(self, address, port):
        connection = super().connect(address, port)
        if self._address == f"127.0.0.{SLOW[1:]}":
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 200_000)
        return connection


class Threads:
    """Stands in for `Probes`."""

    def __init__(self, pool, names):
        self._pool = pool
        self._probes = {name: Probe(f"127.0.0.{name[1:]}") for name in names}
        self.silent = {}
        self.names = list(names)
        self.actors = {name: self._actor(name) for name in names}

    def _actor(self, name):
        def remote(method):
            return SimpleNamespace(
                remote=lambda *values: self._pool.submit(getattr(self._probes[name], method), *values)
            )

        return SimpleNamespace(**{method: remote(method) for method in dir(NodeProbe) if method[0] != "_"})

    def ask(self, call, awaited, names=None, *, timeout_s=None):
        refs = {name: call(self.actors[name], name) for name in (self.names if names is None else names)}
        return self.answers(refs, awaited)

    def answers(self, refs, awaited, *, timeout_s=None):
        return {name: ref.result() for name, ref in refs.items()}


@pytest.fixture
def probes():
    with ThreadPoolExecutor(16) as pool:
        yield Threads(pool, NAMES)


NODES = {name: ClusterNode(name, name, f"127.0.0.{name[1:]}", name, 1) for name in NAMES}


def test_a_node_that_sends_slowly_is_blamed(probes):
    rates, broken = measure_transfers(probes, NODES, seconds=0.05)
    assert not broken
    assert len(rates) == 12
    assert blame(rates).nodes[SLOW].verb == "sends"


def test_an_interpreter_that_a_node_lacks_leaves_the_all_reduce_out(probes):
    found = measure_all_reduce(
        *(probes, list(NODES.values()), CPU),
        python="/nowhere/python",
        ranks_per_node=1,
        variables={name: {} for name in NAMES},
        timeout_s=60,
    )
    assert found.skipped == "/nowhere/python does not exist on n2, n3, n4, n5"


def test_the_nodes_of_ranks_that_fail_are_named_with_the_reason(probes, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$4" in *\'"rank": 2\'*) echo "no such device" >&2; exit 1;; esac\nexit 0\n')
    python.chmod(0o755)
    found = measure_all_reduce(
        *(probes, list(NODES.values()), CPU),
        python=str(python),
        ranks_per_node=1,
        variables={name: {} for name in NAMES},
        timeout_s=60,
    )
    assert found.problems == {SLOW: "no such device"}
    assert found.seconds is None
    assert (found.num_ranks, found.num_nodes) == (4, 4)
