from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_core.environments.messages import (
    MAX_NESTING,
    Answer,
    MalformedAnswer,
    plain_result,
    read_reply,
    write_answers,
    write_built,
    write_problem,
)
from rl_core.errors import WorkerError
from rl_core.rollouts.environment import EnvironmentFailure, StepResult

ASKED = ("step", [b""], {})
BUILD = ("build", "it", b"", "it", "its memory")
ABANDON = ("abandon", ["a"])

texts = st.text(st.characters(), max_size=8) | st.just("\ud800")
scalars = st.none() | st.booleans() | st.integers(-(2**500), 2**500) | st.floats() | texts | st.binary(max_size=8)
arrays = st.builds(
    lambda kind, shape: np.arange(int(np.prod(shape))).reshape(shape).astype(kind),
    st.sampled_from(["i4", "f8", "?", "u1", "c16", "S3", "U3", "M8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
)
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)
finite = st.floats(allow_nan=False, allow_infinity=False)
results = st.builds(
    StepResult,
    reward=finite | st.dictionaries(texts, finite, max_size=3),
    done=st.booleans(),
    observation=st.lists(st.dictionaries(texts, values, max_size=2), max_size=2).map(tuple),
    stop_strings=st.none() | st.lists(texts, max_size=2).map(tuple),
    info=st.dictionaries(texts, values, max_size=3),
)
outcomes = results | st.builds(EnvironmentFailure, texts)


def same(one: Any, other: Any) -> bool:
    """Equality of plain values and their types, with arrays compared whole and NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and one != one:
        return other != other
    return bool(one == other)


@given(st.lists(st.builds(Answer, outcomes, st.booleans(), st.booleans(), st.booleans()), max_size=3))
def test_answers_arrive_as_they_were_sent(answers: list[Answer]) -> None:
    plain = [
        a if isinstance(a.result, EnvironmentFailure) else Answer(plain_result(a.result), a.has_state, a.retry)
        for a in answers
    ]
    arrived = read_reply(("step", [b""] * len(plain), {}), write_answers(plain))
    for one, other in zip(arrived, plain, strict=True):
        assert (one.has_state, one.retry, one.out_of_memory) == (other.has_state, other.retry, other.out_of_memory)
        assert same(list(vars(one.result).values()), list(vars(other.result).values()))


def deep(num: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(num):
        value = wrap(value)
    return value


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("an answer was unpickled",)


def of_tuples(num: int) -> msgpack.ExtType:
    return deep(num, lambda inner: msgpack.ExtType(1, msgpack.packb([inner])))


GOOD = write_answers([Answer(StepResult({"reward": 1.0}, info={"x": np.arange(3), "t": (1, 2)}), has_state=True)])
RESULT = [1.0, True, [], None, {}]
FLAGS = [False, False, False, None]


def array_of(*fields: Any) -> bytes:
    return msgpack.packb([[[1.0, True, [], None, {"x": msgpack.ExtType(2, msgpack.packb(list(fields)))}], *FLAGS]])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps(Bomb()),
        GOOD[:-1],
        GOOD + b"\0",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb([[RESULT, *FLAGS]] * 2),
        msgpack.packb([[RESULT, *FLAGS, 1]]),
        msgpack.packb([[RESULT, 1, 0, 0]]),
        msgpack.packb([[[float("nan"), *RESULT[1:]], *FLAGS]]),
        msgpack.packb([[[10**400 // 10**390, *RESULT[1:]], *FLAGS]]),
        msgpack.packb([[[{1: 1.0}, *RESULT[1:]], *FLAGS]]),
        msgpack.packb([[[1.0, 1, [], None, {}], *FLAGS]]),
        msgpack.packb([[[1.0, True, ["text"], None, {}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], [7], {}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], "stop", {}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], None, {1: 2}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], None, {"x": msgpack.Timestamp(1)}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], None, {"x": msgpack.ExtType(9, b"")}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], None, {"x": msgpack.ExtType(3, b"1" * 10**6)}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], None, {"x": of_tuples(10**4)}], *FLAGS]]),
        msgpack.packb([[[1.0, True, [], None, {"x": deep(200, lambda inner: [inner])}], *FLAGS]]),
        b"\x91" * 10**5,
        b"\x81\x90" * 10**4,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        array_of("|O8", [1], b"12345678"),
        array_of("<f8", [2], b"12345678"),
        array_of("<f8", [-1], b"12345678"),
        array_of("<f8", [2**62, 0], b""),
        array_of("|S0", [2**60], b""),
        array_of("i4,i4", [1], b"12345678"),
        array_of("(2,", [1], b"12345678"),
        array_of("<f8", [1.0], b"12345678"),
        array_of("<f8", 1, b"12345678"),
    ],
    ids=lambda data: f"{data[:12].hex()}.{len(data)}",
)
def test_bytes_that_are_not_an_answer_are_told_from_one(data: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        read_reply(ASKED, data)


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)))
@example(b"")
def test_any_bytes_are_an_answer_or_malformed(change: bytes | tuple[int, int]) -> None:
    data = change
    if isinstance(change, tuple):
        at, byte = change
        data = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    for request in (ASKED, ABANDON, BUILD):
        try:
            answer = read_reply(request, data)
        except MalformedAnswer:
            continue
        # what is read can be sent on and written
        pickle.dumps(answer)
        repr(answer)


def test_errors_and_problems_arrive() -> None:
    error = read_reply(BUILD, write_built(WorkerError("OSError", "no", "trace")))
    assert (error.kind, error.message, error.traceback) == ("OSError", "no", "trace")
    assert read_reply(BUILD, write_built(True)) is True
    assert read_reply(ABANDON, write_problem("raised")) == "raised"
    assert read_reply(ABANDON, write_problem(None)) is None


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (StepResult(info={"x": {1, 2}}), r"info\['x'\] holds a set"),
        (StepResult(agent_rewards={"second": None}), "the reward is None; return a number"),  # type: ignore[dict-item]
        (StepResult(next_agent=2), "the name of an agent must be a string, got 2"),  # type: ignore[arg-type]
        (StepResult(info={"x": [np.array([object()])]}), "holds an array of object"),
        (StepResult(info={"x": {(1, 2): 3}}), "key of type tuple"),
        (StepResult(info={"x": 2**600}), "integer of 601 bits"),
        (StepResult(info={"x": deep(MAX_NESTING + 1, lambda inner: [inner])}), "nested deeper than 32"),
        (StepResult(info={"x": deep(10**5, lambda inner: [inner])}), "nested deeper than 32"),
        (StepResult(info={"x": b"1" * (65 * 2**20)}), "it may have 64 MiB"),
        (StepResult(reward=float("inf")), "the reward is inf; return a finite number"),
        (StepResult(reward={"reward": 1.0, "form": None}), "the reward 'form' is None; return a number"),  # type: ignore[dict-item]
        (StepResult(reward="1.0"), "the reward is '1.0'; return a number"),  # type: ignore[arg-type]
        (StepResult(reward=np.zeros(2)), "which is not a single number"),  # type: ignore[arg-type]
        (StepResult(observation=("text",)), "str instead of a message"),  # type: ignore[arg-type]
        (StepResult(stop_strings="stop"), "stop_strings must be a tuple"),  # type: ignore[arg-type]
    ],
)
def test_results_that_may_not_leave_the_process_are_refused_there(result: StepResult, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        plain_result(result)


def test_the_deepest_result_arrives() -> None:
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {"x": inner}):
        result = plain_result(StepResult(info={"x": deep(MAX_NESTING - 1, wrap)}))
        [answer] = read_reply(ASKED, write_answers([Answer(result)]))
        assert answer.result == result


def test_agents_of_an_answer_arrive() -> None:
    result = StepResult(agent="first", next_agent="second", agent_rewards={"second": {"reward": -1.0}, "third": 0.5})
    (answer,) = read_reply(ASKED, write_answers([Answer(plain_result(result))]))
    assert answer.result == result


@pytest.mark.parametrize("agents", [[1, "", {}], ["", None, {}], ["", "", {"a": "1"}], ["", "", {1: 1.0}], ["", ""]])
def test_agents_of_another_kind_are_malformed(agents: list[Any]) -> None:
    fields = [[0.0, True, [], None, None, {}, *agents], False, False, False]
    with pytest.raises(MalformedAnswer):
        read_reply(ASKED, msgpack.packb([fields], strict_types=True))
