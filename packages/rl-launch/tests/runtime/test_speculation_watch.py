"""Counts of speculative decoding over the steps of a run, from replicas that come and go."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rl_core.errors import FailureOrigin, WorkerDied, WorkerError
from rl_core.rollouts.speculation import SpeculationCounts
from rl_launch.runtime import replica as replica_module
from rl_launch.runtime.replica import SpeculationWatch


class Replica:
    """Answers with the counts that it was given, or fails."""

    def __init__(self, answer: SpeculationCounts | Exception | None) -> None:
        self.answer = answer
        self.num_calls = 0

    def call(self, method: str) -> Replica:
        assert method == "health"
        self.num_calls += 1
        return self

    def origin(self, phase: str) -> FailureOrigin:
        return FailureOrigin("rollout worker", 0, "node", phase)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SpeculationWatch:
    def fetch(call: Replica, origin: FailureOrigin, timeout_s: float) -> dict[str, Any]:
        if isinstance(call.answer, Exception):
            raise call.answer
        return {} if call.answer is None else dict(call.answer.as_health())

    monkeypatch.setattr(replica_module, "fetch", fetch)
    return SpeculationWatch()


def counts(num_tokens: int, num_steps: int) -> SpeculationCounts:
    return SpeculationCounts(num_tokens, num_steps, num_steps, 3 * num_steps, (num_tokens - num_steps, 0, 0), 1.3)


def test_a_step_has_what_all_replicas_added_since_the_one_before(watch: SpeculationWatch) -> None:
    replicas = [Replica(counts(20, 10)), Replica(counts(30, 20))]
    assert watch.take(replicas) == counts(50, 30)
    replicas[0].answer = counts(32, 16)
    replicas[1].answer = WorkerDied("the process ended", replicas[1].origin("speculation"))
    assert watch.take(replicas) == counts(12, 6)
    replicas[1].answer = counts(6, 4)  # another process, which counts from its start
    assert watch.take(replicas) == counts(6, 4)


ORIGIN = FailureOrigin("rollout worker", 0, "node", "speculation")


@pytest.mark.parametrize(
    "failure", [WorkerDied("the process ended", ORIGIN), WorkerError("RuntimeError", "it does not start", "", ORIGIN)]
)
def test_engines_without_drafts_are_asked_once(watch: SpeculationWatch, failure: Exception) -> None:
    dead, plain = Replica(failure), Replica(None)
    assert watch.take([dead]) is None
    assert watch.take([dead, plain]) is None
    assert watch.take([dead, plain]) is None
    assert (dead.num_calls, plain.num_calls) == (2, 1)


def test_a_warning_names_the_key_when_speculation_begins_not_to_pay(
    watch: SpeculationWatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(None)
    with caplog.at_level(logging.WARNING, replica_module.__name__):
        for total in (counts(20, 10), counts(31, 20), counts(42, 30), counts(62, 40), counts(73, 50)):
            replica.answer = total
            watch.take([replica])
    assert [record.getMessage().partition(", ")[0] for record in caplog.records] == [
        "speculative decoding does not pay: requests got 1.10 tokens per engine step"
    ] * 2
    assert "min_tokens_per_step" in caplog.text
