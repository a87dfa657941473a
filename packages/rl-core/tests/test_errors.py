from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

from rl_core import errors
from rl_core.errors import (
    ConfigError,
    ConfigProblems,
    DataError,
    FailureOrigin,
    Problem,
    RLError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
)

ORIGIN = FailureOrigin("policy", 3, "10.0.0.7", "train_step")
ARGUMENTS: dict[type[RLError], tuple[Any, ...]] = {
    ConfigProblems: ("2 problems", (Problem("grpo.seed", got="x", allowed="int"), Problem("policy", "must be set"))),
    WeightSyncError: ("2 tensors missing", ("a.weight", "b.weight")),
    WorkerError: ("torch.OutOfMemoryError", "no memory", "Traceback ...", ORIGIN),
    WorkerDied: ("killed", ORIGIN),
}


def kinds() -> list[type[RLError]]:
    found, queue = [], [RLError]
    while queue:
        kind = queue.pop()
        queue.extend(kind.__subclasses__())
        if kind.__module__ == errors.__name__:
            found.append(kind)
    return found


@pytest.mark.parametrize("kind", kinds())
def test_every_error_comes_through_a_pipe_as_it_was(kind: type[RLError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what happened",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)


def test_what_a_user_did_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    assert not issubclass(WorkerError, ValueError)


def test_a_workers_failure_says_where_it_happened() -> None:
    error = WorkerError("KeyError", "'x'", "Traceback")
    assert str(error) == "KeyError: 'x'"
    placed = error.at(ORIGIN)
    assert str(placed) == "policy rank 3 on 10.0.0.7 during train_step: KeyError: 'x'"
    assert placed.traceback == "Traceback"
    assert error.origin is None
    assert str(WorkerDied("killed", ORIGIN)) == "policy rank 3 on 10.0.0.7 during train_step: killed"


def test_a_models_failure_names_its_config_section_once() -> None:
    named_alike = FailureOrigin("value", 0, "10.0.0.7", "start", section="value")
    assert str(named_alike) == "value rank 0 on 10.0.0.7 during start"
    another = FailureOrigin("teacher", 0, "10.0.0.7", "start", section="teachers.first")
    assert str(another) == "teacher (config section teachers.first) rank 0 on 10.0.0.7 during start"


def test_a_traceback_shows_the_message_alone() -> None:
    shown = "".join(traceback.format_exception_only(WeightSyncError("broken", ("a",))))
    assert shown.strip().endswith("WeightSyncError: broken")
