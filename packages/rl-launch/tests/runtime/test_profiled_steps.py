"""Profiles over the steps of `profiling.steps`, whatever a profiler does."""

import logging

import pytest

from rl_core.errors import WorkerDied
from rl_core.tracing.profiling import ProfileReport
from rl_launch.run_session.config import ProfilingConfig
from rl_launch.runtime import observed_steps
from rl_launch.runtime.observed_steps import Profiled, ProfiledSteps


class Worker:
    """A worker whose calls are answered at once, or fail."""

    def __init__(self, problems=(), failure=None):
        self.calls = []
        self.problems = problems
        self.failure = failure

    def call(self, method, *orders):
        self.calls.append((method, *orders))
        if self.failure is not None:
            return self.failure
        return ProfileReport(("policy-0.torch.json.gz",) if method == "stop_profile" else (), tuple(self.problems))


@pytest.fixture
def made(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def fetch(answer, _origin, _timeout_s):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(observed_steps, "fetch", fetch)

    def make(workers, **settings):
        config = ProfilingConfig(**{"steps": [5, 7], **settings})
        profiled = [Profiled(f"policy-{rank}", rank, worker.call) for rank, worker in enumerate(workers)]
        return ProfiledSteps(config, tmp_path, lambda: profiled, py_spy="py-spy")

    return make


def steps(profiles, *numbers):
    for step in numbers:
        profiles.begin_step(step)
        profiles.end_step(step, {})


def test_both_ends_are_included_and_other_ranks_are_left_alone(made, tmp_path):
    first, second = Worker(), Worker()
    profiles = made([first, second], ranks=[1], tools=["torch", "py-spy"])
    steps(profiles, 3, 4)
    assert second.calls == []
    steps(profiles, 5, 6)
    ((method, order),) = second.calls
    assert (method, order.name, order.tools) == ("start_profile", "policy-1", ("torch", "py-spy"))
    assert order.folder == str(tmp_path / "profiles" / "step_5-7")
    steps(profiles, 7, 8)
    assert [call[0] for call in second.calls] == ["start_profile", "stop_profile"]
    assert first.calls == []


def test_a_resumed_run_profiles_the_steps_that_it_makes(made, tmp_path):
    worker = Worker()
    steps(made([worker]), 7, 8)
    assert worker.calls[0][1].folder == str(tmp_path / "profiles" / "step_7-7")
    later = Worker()
    steps(made([later]), 8, 9)
    assert later.calls == []


def test_a_run_that_ends_in_between_writes_what_it_has(made):
    worker = Worker()
    profiles = made([worker])
    steps(profiles, 5)
    profiles.close()
    profiles.close()
    assert [call[0] for call in worker.calls] == ["start_profile", "stop_profile"]


def test_neither_a_tool_nor_a_dead_worker_ends_the_run(made, caplog):
    broken, dead = Worker(["policy-0: py-spy failed: no permission"]), Worker(failure=WorkerDied("the process ended"))
    steps(made([broken, dead], ranks=[0, 1]), 5, 6, 7)
    assert "no permission" in caplog.text
    assert "no profile of policy-1: the process ended" in caplog.text
    assert "profiles of steps 5 to 7: policy-0.torch.json.gz" in caplog.text


def test_a_run_that_ends_before_the_steps_says_so(made, caplog):
    profiles = made([Worker()])
    profiles.start(5, [])
    assert "nothing is profiled" not in caplog.text
    profiles.start(4, [])
    assert "begins with step 5, but the run ends with step 4: nothing is profiled" in caplog.text
