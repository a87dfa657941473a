"""Failures of Ray in this project's terms: those of real actors, and each class of error by itself."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import ray
from ray import exceptions as failures
from ray.exceptions import RayTaskError

import rl_core.ray.model
from rl_core.errors import (
    FailureOrigin,
    GeneratorError,
    PeerFailed,
    RLError,
    WorkerDied,
    WorkerEnvironmentError,
    WorkerError,
    WorkerStalled,
)
from rl_core.ray import calls
from rl_core.ray.calls import fetch, gather, outcomes, request_stacks, settle, translate, wait
from rl_core.ray.host import CONCURRENCY_GROUPS, WorkerHost
from rl_core.ray.model import RemoteModel

ORIGIN = FailureOrigin("policy", 3, "10.0.0.7", "train_step")


WORKER = "stubborn_worker:StubbornWorker"
ON_PATH = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}}


@pytest.fixture
def start(local_ray, tmp_path):
    """Starts a worker that logs to `tmp_path / <number>.log`."""
    actors = []

    def start():
        host = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerHost)
        actor = host.options(num_cpus=0, runtime_env=ON_PATH).remote()
        ray.get([actor.log_to.remote(str(tmp_path / f"{len(actors)}.log")), actor.build.remote(WORKER)])
        actors.append(actor)
        return actor

    yield start
    for actor in actors:
        ray.kill(actor)


def test_answers_come_in_the_order_of_the_calls_whoever_answers_first(start, tmp_path):
    first, second = start(), start()
    late = first.call.remote("wait_for", str(tmp_path / "go"))
    early = second.call.remote("echo", 2)
    assert fetch(early, ORIGIN) == 2
    (tmp_path / "go").touch()
    assert gather([late, early], [ORIGIN, ORIGIN], 60) == [str(tmp_path / "go"), 2]


def test_one_failure_among_calls_that_are_over_leaves_the_other_answers(start):
    actor = start()
    refs = [actor.call.remote("echo", 1), actor.call.remote("fail", "one third"), actor.call.remote("echo", 3)]
    # answers of one process may come in another order than its calls end in
    ray.wait(refs, num_returns=len(refs), timeout=60)
    assert wait(refs) == refs
    first, failure, last = outcomes(refs, [ORIGIN] * 3)
    assert (first, last) == (1, 3)
    assert isinstance(failure, WorkerError)
    assert "policy rank 3" in str(failure)


def test_a_time_out_bounds_the_whole_wait_and_says_how_many_are_late(start, tmp_path):
    actor, other = start(), start()
    answered = [other.call.remote("echo", value) for value in range(3)]
    gather(answered, [ORIGIN] * 3, 60)
    waiting = [actor.call.remote("wait_for", str(tmp_path / "go")) for _ in range(2)]
    with pytest.raises(WorkerStalled, match=r"policy rank 3 .*no answer within 0.5 s, nor from 1 more"):
        gather([*answered, *waiting], [ORIGIN] * 5, 0.5)
    (tmp_path / "go").touch()


def test_a_foreign_failure_carries_its_text_and_its_origin(start):
    with pytest.raises(WorkerError, match=r"policy rank 3 on 10\.0\.0\.7 .*ArithmeticError: one third"):
        gather([start().call.remote("fail", "one third")], [ORIGIN])


def test_a_process_that_ends_is_a_dead_worker(start):
    # Ray gives up on the connection if it has not heard of the death a second later
    said = "the process ended: .*exit|the process could not be reached: "
    with pytest.raises(WorkerDied, match=rf"policy rank 3 .*({said})"):
        gather([start().call.remote("end")], [ORIGIN], 60)


def test_the_use_of_resources_is_read_while_another_call_runs(start, tmp_path):
    worker = start()
    waiting = worker.call.remote("wait_for", str(tmp_path / "go"))
    usage = fetch(worker.usage.remote(with_machine=True), ORIGIN, 60)
    (tmp_path / "go").touch()
    assert fetch(waiting, ORIGIN, 60)
    assert 0 < usage.process.memory_bytes < usage.machine.memory_total_bytes


def test_a_model_that_does_not_answer_leaves_the_stacks_of_its_ranks_in_their_logs(start, tmp_path, monkeypatch):
    workers = [start(), start()]
    model = RemoteModel(workers, role="policy", nodes=["here"] * 2, timeout_s=60, logs=["policy-0.log", "policy-1.log"])
    model._timeout_s = 0.5
    # a task on the node asks for the stacks, whose process may take longer to start than a run would wait
    monkeypatch.setattr(rl_core.ray.model, "request_stacks", partial(request_stacks, timeout_s=240))
    for rank, worker in enumerate(workers):
        worker.call.remote("hang_in_a_named_function", str(tmp_path / f"{rank}.hangs"))
    _await(lambda: all((tmp_path / f"{rank}.hangs").exists() for rank in range(2)))
    with pytest.raises(
        WorkerStalled, match=r"policy rank 0 on here .*asked 2 of 2 processes to write the stacks.*policy-0\.log"
    ):
        model.call_all("coordinates")
    _await(lambda: all("hang_in_a_named_function" in _text(tmp_path / f"{rank}.log") for rank in range(2)))


def _await(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _text(path):
    return path.read_text() if path.exists() else ""


def test_both_sides_of_an_exchange_are_heard_after_the_first_failure(start, tmp_path):
    sender, receiver, idle = start(), start(), start()
    refs = [
        sender.call.remote("wait_for", str(tmp_path / "interrupted")),
        receiver.call.remote("fail", "the receiver broke"),
        idle.call.remote("echo", 1),
    ]

    def interrupt(error):
        assert "the receiver broke" in str(error)
        sender.interrupt.remote(str(tmp_path / "interrupted"), "the sender was told")

    answers, errors = settle(refs, [ORIGIN] * 3, 60, grace_s=60, on_failure=interrupt)
    assert answers == []
    assert [str(error).rpartition(": ")[2] for error in errors] == ["the receiver broke", "the sender was told"]


def test_an_exchange_that_succeeds_answers_in_order(start):
    actor, other = start(), start()
    refs = [actor.call.remote("echo", 1), other.call.remote("echo", 2)]
    assert settle(refs, [ORIGIN] * 2, 60, grace_s=60, on_failure=pytest.fail) == ([1, 2], [])


def test_an_exchange_that_stalls_ends_after_the_grace(start, tmp_path):
    stuck = start()
    refs = [stuck.call.remote("wait_for", str(tmp_path / "never"))]
    told = []
    answers, errors = settle(refs, [ORIGIN], 0.2, grace_s=0.2, on_failure=told.append)
    assert (answers, errors) == ([], told)
    assert type(told[0]) is WorkerStalled
    (tmp_path / "never").touch()


class _Actors:
    """Answers of Ray about an actor: alive a few times, then dead."""

    def __init__(self, num_alive):
        self.num_alive = num_alive

    def __call__(self, actor_id):
        self.num_alive -= 1
        return {"State": "ALIVE"} if self.num_alive >= 0 else {}


def test_one_that_cannot_be_reached_is_waited_for_until_ray_decides(monkeypatch):
    actors = _Actors(num_alive=3)
    monkeypatch.setattr(calls, "actor_states", actors)
    monkeypatch.setattr(calls, "_DECISION_POLL_S", 0.001)
    unavailable = failures.ActorUnavailableError("the connection was closed", b"a" * 16)

    def get(ref, timeout):
        raise unavailable

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(WorkerDied, match="could not be reached: Ray has declared it dead"):
        fetch(None, ORIGIN)
    assert actors.num_alive == -1


DEATHS = [
    failures.ActorUnavailableError("closed", b"a" * 16),
    failures.ActorDiedError(),
    failures.ActorUnschedulableError("its node is gone"),
    failures.TaskUnschedulableError("its node is gone"),
    failures.NodeDiedError("its node is gone"),
    failures.WorkerCrashedError(),
    failures.LocalRayletDiedError(),
    failures.OutOfMemoryError("too much"),
    failures.ObjectLostError("aa", None, ""),
    failures.OwnerDiedError("aa", None, ""),
    failures.ObjectFetchTimedOutError("aa", None, ""),
    failures.ActorPlacementGroupRemoved(),
    failures.TaskPlacementGroupRemoved(),
]


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
def test_what_ends_a_worker_is_a_death(error):
    found = translate(error, ORIGIN)
    assert type(found) is WorkerDied
    assert "policy rank 3" in str(found)


def test_errors_that_are_no_deaths_keep_their_kind():
    assert type(translate(failures.RuntimeEnvSetupError("no python"), ORIGIN)) is WorkerEnvironmentError
    assert type(translate(failures.GetTimeoutError(), ORIGIN)) is WorkerStalled
    full = translate(failures.ObjectStoreFullError("no room"), ORIGIN)
    assert (type(full), full.kind) == (WorkerError, "ObjectStoreFullError")
    assert type(translate(RayTaskError("call", "", GeneratorError("ill")), ORIGIN)) is GeneratorError
    assert type(translate(RayTaskError("call", "", failures.OwnerDiedError("aa", None, "")), ORIGIN)) is WorkerDied


def test_errors_that_name_no_worker_say_whose_they_are():
    own = translate(RayTaskError("call", "", RLError("3 training steps in a row were skipped")), ORIGIN)
    assert (type(own), str(own)) == (RLError, f"{ORIGIN}: 3 training steps in a row were skipped")
    repeated = translate(RayTaskError("call", "", PeerFailed("rank 0 failed: OSError: full")), ORIGIN)
    assert (type(repeated), str(repeated)) == (PeerFailed, "policy rank 0 failed: OSError: full")
