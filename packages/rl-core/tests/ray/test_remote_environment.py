"""The facade of an environment's pool, in front of an actor that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import ObjectLostError, RayActorError, RayError

from rl_core.ray.environment import RemoteEnvironment
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult

BOUND_S = 60.0
"""Most seconds that a test waits for what must come; long, as nothing is measured by it."""


def turn(id: Any) -> Conversation:
    return Conversation(id=str(id), messages=({"role": "user", "content": "?"},), info={}, completion=str(id))


def remote(answer: Callable[[str, Any], Any], **times: float) -> RemoteEnvironment:
    async def call(method: str, *arguments: Any) -> Any:
        # how long the pool may take comes first, if it may take long
        outcome = answer(method, arguments[1] if method in ("step_within", "late") else arguments[0])
        return await outcome if isinstance(outcome, Awaitable) else outcome

    return RemoteEnvironment(SimpleNamespace(call=SimpleNamespace(remote=call)), name="judge", **times)


async def outcomes(environment: RemoteEnvironment, ids: Sequence[Any]) -> list[StepResult | EnvironmentFailure]:
    async with asyncio.timeout(BOUND_S):
        return await asyncio.gather(*(environment.step(turn(id)) for id in ids))


def test_calls_made_together_travel_together_and_each_gets_its_own_answer() -> None:
    sizes = []

    def answer(method: str, conversations: Sequence[Conversation]) -> list[StepResult]:
        sizes.append(len(conversations))
        return [StepResult(float(conversation.completion)) for conversation in conversations]

    assert [result.reward for result in asyncio.run(outcomes(remote(answer), range(10)))] == list(range(10))
    assert sizes == [10]


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        RayError("the node is gone"),
        ObjectLostError("00", "owner", "at"),
        TypeError("cannot pickle"),
        ValueError("a conversation can take one step at a time"),
    ],
)
def test_whatever_a_call_raises_is_every_conversations_answer(error: Exception) -> None:
    def answer(method: str, conversations: Sequence[Conversation]) -> list[StepResult]:
        raise error

    for outcome in asyncio.run(outcomes(remote(answer), range(3))):
        assert isinstance(outcome, EnvironmentFailure)
        assert "environment judge" in outcome.reason


def test_a_conversation_that_cannot_be_sent_fails_alone() -> None:
    def call(method: str, patience_s: float, conversations: Sequence[Conversation], client: str) -> Any:
        cloudpickle.dumps(conversations)  # as Ray does before it sends
        answers = asyncio.get_running_loop().create_future()
        answers.set_result([StepResult(1.0) for _ in conversations])
        return answers

    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    hostile = replace(turn("deep"), info={"x": nested})
    environment = RemoteEnvironment(SimpleNamespace(call=SimpleNamespace(remote=call)), name="judge")

    async def run() -> list[StepResult | EnvironmentFailure]:
        async with asyncio.timeout(BOUND_S):
            return await asyncio.gather(*(environment.step(each) for each in (turn(1), hostile, turn(2))))

    first, deep, last = asyncio.run(run())
    assert (first, last) == (StepResult(1.0), StepResult(1.0))
    assert isinstance(deep, EnvironmentFailure)


def test_too_few_answers_are_a_failure_of_each_conversation() -> None:
    for outcome in asyncio.run(outcomes(remote(lambda method, conversations: [StepResult()]), range(3))):
        assert isinstance(outcome, EnvironmentFailure)
        assert "1 answers to 3 conversations" in outcome.reason


def test_an_environment_that_failed_once_is_called_again() -> None:
    calls = []

    def answer(method: str, conversations: Sequence[Conversation]) -> list[StepResult]:
        calls.append(len(conversations))
        if len(calls) == 1:
            raise RayError("for a moment")
        return [StepResult(1.0) for _ in conversations]

    async def run() -> None:
        environment = remote(answer)
        [first] = await outcomes(environment, [0])
        [second] = await outcomes(environment, [0])
        assert isinstance(first, EnvironmentFailure)
        assert isinstance(second, StepResult)

    asyncio.run(run())


def test_the_lease_on_open_conversations_is_renewed_until_they_end() -> None:
    renewed = asyncio.Event()
    clients = set()

    def answer(method: str, argument: Any) -> Any:
        if method == "renew":
            clients.add(argument)
            renewed.set()
            return None
        return [StepResult(done=conversation.completion == "end") for conversation in argument]

    async def run() -> None:
        environment = remote(answer, renew_s=0.01)
        async with asyncio.timeout(BOUND_S):
            await environment.step(turn("0"))
            for _ in range(3):
                renewed.clear()
                await renewed.wait()
            await environment.step(Conversation(id="0", messages=(), info={}, completion="end"))
            keepers = [task for task in asyncio.all_tasks() if "_keep" in repr(task)]
            await asyncio.gather(*keepers)
        assert len(clients) == 1

    asyncio.run(run())


def test_rollouts_fail_that_wait_for_an_environment_which_answers_nothing() -> None:
    async def run() -> None:
        environment = remote(lambda method, argument: asyncio.Event().wait(), renew_s=0.01, silence_s=0.1)
        for outcome in await outcomes(environment, range(3)):
            assert isinstance(outcome, EnvironmentFailure)
            assert "environment judge has not answered for 0.1 s" in outcome.reason
        with pytest.raises(TimeoutError):
            await environment.abandon(["0"])

    asyncio.run(run())


def test_a_lease_that_cannot_be_renewed_costs_no_answer() -> None:
    refused = asyncio.Event()

    def answer(method: str, argument: Any) -> Any:
        if method == "renew":
            refused.set()
            raise RayActorError
        return later(argument)

    async def later(conversations: Sequence[Conversation]) -> list[StepResult]:
        await refused.wait()
        return [StepResult(1.0) for _ in conversations]

    async def run() -> None:
        [result] = await outcomes(remote(answer, renew_s=0.01), [0])
        assert isinstance(result, StepResult)

    asyncio.run(run())


def test_an_answer_does_not_wait_for_one_that_takes_long() -> None:
    go = asyncio.Event()

    async def later(ids: Sequence[str]) -> list[StepResult | None]:
        await go.wait()
        return [StepResult(2.0) for _ in ids]

    def answer(method: str, argument: Any) -> Any:
        if method == "late":
            assert argument == ["slow"]
            return later(argument)
        return [None if conversation.id == "slow" else StepResult(1.0) for conversation in argument]

    async def run() -> None:
        environment = remote(answer)
        slow = asyncio.create_task(environment.step(turn("slow")))
        [quick] = await outcomes(environment, ["quick"])
        assert isinstance(quick, StepResult)
        assert not slow.done()
        go.set()
        async with asyncio.timeout(BOUND_S):
            assert (await slow).reward == 2.0

    asyncio.run(run())
