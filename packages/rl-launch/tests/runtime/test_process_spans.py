"""Spans of real actors, and clocks of other machines as answers give them."""

from contextlib import suppress

import ray
from ray.exceptions import RayActorError

from rl_core.ray.host import CONCURRENCY_GROUPS, AsyncWorkerHost, WorkerHost
from rl_launch.runtime.observed_steps import Clocks, ProcessSpans

S = 10**9


def test_processes_of_the_drivers_machine_share_its_clock():
    clocks = Clocks("here")
    clocks.note("here", 5 * S, 100 * S, 200 * S)
    assert clocks.offset("here") == 0


def test_the_quickest_answer_gives_the_estimate_and_bounds_its_error():
    clocks, ahead = Clocks("here"), 1000 * S
    for sent, there, back in [(0, 3 * S, 1 * S), (10 * S, S // 100, S // 50), (20 * S, 1 * S, 5 * S)]:
        clocks.note("there", sent + there + ahead, sent, sent + there + back)
    assert abs(clocks.offset("there") + ahead) <= (S // 100 + S // 50) // 2


def test_an_old_estimate_is_replaced_because_clocks_drift():
    clocks = Clocks("here")
    clocks.note("there", 10, 0, 20)
    clocks.note("there", 700 * S, 700 * S, 701 * S)
    assert clocks.offset("there") == S // 2


def _await_end(actor):
    """Wait for the end of an actor that is killed: it may answer calls that reach it before."""
    with suppress(RayActorError):
        while True:
            ray.get(actor.take_spans.remote())


def test_every_kind_of_host_reports_its_calls_and_a_dead_one_is_left_out(machines):
    rank = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerHost).options(num_cpus=0).remote()
    replica = ray.remote(AsyncWorkerHost).options(num_cpus=0).remote()
    dead = ray.remote(AsyncWorkerHost).options(num_cpus=0).remote()
    ray.get([rank.build.remote("fractions:Fraction", 1, 3), replica.place.remote(), dead.place.remote()])
    assert ray.get(rank.call.remote("limit_denominator", 2)) == ray.get(rank.call.remote("limit_denominator", 2))
    ray.kill(dead)
    _await_end(dead)
    actors = {"policy-0": rank, "rollout-worker-0": replica, "rollout-worker-1": dead}
    found = ProcessSpans(lambda: actors).collect()

    by_name = {each.process: each for each in found}
    assert set(by_name) == {"policy-0", "rollout-worker-0"}
    assert by_name["policy-0"].offset == 0
    calls = [(span.track, span.name) for span in by_name["policy-0"].report.spans]
    assert calls == [("calls", "start"), ("calls", "limit_denominator"), ("calls", "limit_denominator")]
