from __future__ import annotations

import pickle
from typing import Any

import pytest

from rl_core.environments.process import EnvironmentProcess
from rl_core.environments.reward_function import as_environment
from rl_core.rollouts.environment import Conversation, Environment, EnvironmentFailure, StepResult
from rl_core.testing.environment import EnvironmentSuite


def conversation(completion: str, id: str = "0", **info: Any) -> Conversation:
    return Conversation(id=id, messages=({"role": "user", "content": "?"},), info=info, completion=completion)


class Counting:
    """Two turns, then done; with faults to be found by the suite."""

    def __init__(self, *faults: str) -> None:
        self._faults = faults
        self._num_calls = 0

    def step(self, conversations: list[Conversation], states: list[Any]) -> list[StepResult]:
        self._num_calls += 1
        results = [self._one(c, state) for c, state in zip(conversations, states, strict=True)]
        return results[::-1] if "disorder" in self._faults else results

    def close(self, states: list[Any]) -> None:
        if "close once" in self._faults and any(state.pop("closed", False) for state in states):
            raise RuntimeError("closed already")
        for state in states:
            state["closed"] = True

    def _one(self, conversation: Conversation, state: Any) -> StepResult:
        turn = 0 if state is None else state["turn"]
        reward = float(len(conversation.completion) + 10 * turn)
        if "leak" in self._faults:
            reward += 10 * self._num_calls * bool(turn)
        if "dice" in self._faults:
            reward += self._num_calls
        observation = () if "silent" in self._faults else ({"role": "user", "content": "go on"},)
        info = {"what": object()} if "foreign" in self._faults else {}
        return StepResult(reward, turn == 1, observation, {"turn": turn + 1}, info=info)


class TestCounting(EnvironmentSuite):
    def environment(self) -> Environment:
        return Counting()

    def conversations(self) -> list[Conversation]:
        return [conversation("x" * i, str(i)) for i in range(4)]


class TestFunction(EnvironmentSuite):
    def environment(self) -> Environment:
        return as_environment(
            lambda completion, answer: {"right": float(completion == answer), "short": -len(completion) / 9}
        )

    def conversations(self) -> list[Conversation]:
        return [conversation("x" * i, str(i), answer="xx", seed=3) for i in range(4)]


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("disorder", "test_a_step_gives_one_result_per_conversation_in_order"),
        ("dice", "test_a_step_is_deterministic"),
        ("leak", "test_states_thread_through_turns"),
        ("silent", "test_a_result_that_goes_on_says_what_comes_next"),
        ("foreign", "test_results_leave_the_process"),
        ("close once", "test_closing_twice_is_closing_once"),
    ],
)
def test_the_suite_finds_faults(fault: str, test: str) -> None:
    class Faulty(TestCounting):
        def environment(self) -> Environment:
            return Counting(fault)

    with pytest.raises((AssertionError, RuntimeError)):
        getattr(Faulty(), test)()


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (2, {"reward": 2.0}),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0, "reward": 3.0}),
        ({"a": 1.0, "reward": 0.5}, {"a": 1.0, "reward": 0.5}),
        ({}, {"reward": 0}),
    ],
)
def test_the_reward_trained_on_is_the_named_one_or_the_sum(reward: Any, named: dict[str, float]) -> None:
    assert StepResult(reward).rewards() == named


def test_foreign_text_and_numbers_become_plain_ones() -> None:
    import numpy as np

    class Word(str):
        __slots__ = ()

    environment = as_environment(lambda: 0.0)
    environment.step = lambda conversations, states: [  # type: ignore[method-assign]
        StepResult(np.float32(0.5), info={Word("k"): Word("v"), "n": np.int64(3), "x": np.arange(2), "t": (np.True_,)})
    ]
    [answer] = EnvironmentProcess("it", environment).step([pickle.dumps(conversation("x"))])
    result = answer.result
    assert not isinstance(result, EnvironmentFailure)
    assert type(result.reward) is float
    assert [type(v) for v in result.info.values()] == [str, int, np.ndarray, tuple]
    assert [type(k) for k in result.info] == [str] * 4
    assert type(result.info["t"][0]) is bool
