"""Which replicas are restarted, with replicas that answer, refuse or are dead; Ray's calls are plain ones."""

import contextlib

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rl_core.errors import GeneratorError, Origin, WorkerDied
from rl_launch import rollout_pool
from rl_launch.rollout_pool import MOST_RESTARTS, RolloutPool


class Replica:
    """Fails its first runs in a given way; ill ones answer no question for their health until they are restarted."""

    def __init__(self, failure, *, num_failures=1, ill):
        self.failure, self.num_failures, self.ill = failure, num_failures, ill
        self.num_runs = self.num_restarts = 0

    def call(self, method, *args):
        def answer():
            if method == "health":
                if self.ill:
                    raise GeneratorError("the engine's process died")
                return {}
            self.num_runs += 1
            if self.num_runs <= self.num_failures:
                raise self.failure
            return [f"group of {task}" for task in args[0]]

        return answer

    def origin(self, phase):
        return Origin("rollout worker", 0, "here", phase)

    def kill(self):
        pass

    def begin_start(self):
        self.num_restarts += 1
        return lambda: None


@pytest.fixture
def run(monkeypatch):
    """Two tasks on a replica."""
    monkeypatch.setattr(rollout_pool.ray, "get", lambda ref: ref())
    monkeypatch.setattr(rollout_pool, "gather", lambda refs, origins, timeout=None: [ref() for ref in refs])
    return lambda replica: RolloutPool([replica], None, contextlib.nullcontext).run(["a", "b"])


def failing(text):
    return RayTaskError("call", "its traceback", GeneratorError(text))


def test_one_that_is_well_and_refuses_a_request_is_not_restarted(run):
    replica = Replica(failing("a prompt of 40 tokens leaves no room"), num_failures=99, ill=False)
    with pytest.raises(GeneratorError, match="leaves no room"):
        run(replica)
    assert (replica.num_runs, replica.num_restarts) == (1, 0)


@pytest.mark.parametrize("failure", [failing("the engine's process died"), ActorDiedError()], ids=["engine", "actor"])
def test_one_whose_engine_or_process_died_is_restarted_and_runs_its_tasks_again(run, failure):
    replica = Replica(failure, ill=True)
    assert run(replica) == ["group of a", "group of b"]
    assert (replica.num_runs, replica.num_restarts) == (2, 1)


def test_one_that_dies_again_and_again_ends_the_run(run):
    replica = Replica(failing("the engine's process died"), num_failures=99, ill=True)
    with pytest.raises(WorkerDied, match=f"died {MOST_RESTARTS} times in a row"):
        run(replica)
    assert replica.num_restarts == MOST_RESTARTS
