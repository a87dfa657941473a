"""Nodes of a replica that meet, and end together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rl_core.devices.device import hold_port
from rl_core.errors import GeneratorError
from rl_vllm.engine.nodes import FirstNode, FurtherNodes


@contextmanager
def met(num_nodes: int) -> Iterator[tuple[FurtherNodes, list[FirstNode], threading.Event]]:
    lost = threading.Event()
    with hold_port() as held, ThreadPoolExecutor(num_nodes) as threads:
        meeting = held.getsockname()
        others = [threads.submit(FirstNode.find, meeting, node, 10) for node in range(1, num_nodes)]
        first = FurtherNodes.accept(meeting, num_nodes, 10)
        first.watch(lost.set)
        yield first, [other.result(10) for other in others], lost
        first.close()


def test_all_nodes_learn_the_ports_of_the_first_one() -> None:
    with met(4) as (first, others, lost):
        assert {other.ports for other in others} == {first.ports}
        assert first.ports.ranks != first.ports.engines
        assert not lost.is_set()
        assert first.failure(0) == ""


def test_the_first_part_that_ends_is_named_once() -> None:
    with met(3) as (first, others, lost):
        others[1].report("VllmWorker-5 was killed by SIGKILL")
        assert lost.wait(10)
        others[0]._connection.close()
        assert first.failure() == "node 3 of 3 (127.0.0.1) of the replica: VllmWorker-5 was killed by SIGKILL"


def test_a_process_that_ends_without_a_word_is_named_too() -> None:
    with met(2) as (first, (other,), lost):
        other._connection.close()
        assert lost.wait(10)
        assert first.failure() == "node 2 of 2 (127.0.0.1) of the replica: its process ended"


def test_other_nodes_notice_the_end_of_the_first_and_that_is_no_loss() -> None:
    with met(3) as (first, others, lost), ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(other.await_end) for other in others]
        assert not any(wait.done() for wait in waiting)
        first.close()
        for wait in waiting:
            wait.result(10)
        assert not lost.is_set()


def test_nodes_that_do_not_come_are_counted() -> None:
    with hold_port() as held:
        address, port = meeting = held.getsockname()
        with pytest.raises(GeneratorError, match=rf"2 of 3 nodes .* did not connect to {address}:{port} within 0.1 s"):
            FurtherNodes.accept(meeting, 3, 0.1)
        with pytest.raises(GeneratorError, match=rf"first node of the replica \({address}:{port}\) did not accept"):
            FirstNode.find(meeting, 1, 0.1)
