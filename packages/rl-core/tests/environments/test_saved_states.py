"""Conversations whose environment saves their states resume after the death of its process or of the pool."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pools import pool, turn

from rl_core.errors import WorkerError
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, KeptState, Resumption, StepResult, ToolCall

DICE, FORGETFUL, HUGE = (f"saving_environments:{name}" for name in ("Dice", "Forgetful", "Huge"))


def nth(number: int, completion: str = "roll", id: str = "a", **fields: Any) -> Conversation:
    return dataclasses.replace(turn(id, completion), turn=number, seed=7, **fields)


async def played(envs: Any, *turns: Conversation) -> list[StepResult]:
    results = []
    for each in turns:
        [result] = await envs.step([each])
        assert isinstance(result, StepResult), result
        results.append(result)
    return results


def rewards(results: list[StepResult]) -> list[float]:
    return [result.rewards()["reward"] for result in results]


def undisturbed(folder: Path, count: int = 4) -> list[float]:
    async def run() -> list[float]:
        async with pool(DICE, str(folder)) as envs:
            return rewards(await played(envs, *(nth(number) for number in range(count))))

    return asyncio.run(run())


def steps(folder: Path) -> list[str]:
    return (folder / "steps").read_text().splitlines()


def test_a_conversation_goes_on_after_its_process_was_killed_between_turns(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    (tmp_path / "steps").unlink()

    async def run() -> None:
        async with pool(DICE, str(tmp_path)) as envs:
            first = await played(envs, nth(0), nth(1))
            os.kill(first[0].info["pid"], signal.SIGKILL)
            then = await played(envs, nth(2), nth(3))
            assert rewards(first + then) == expected
            assert then[0].info["pid"] != first[0].info["pid"]

    asyncio.run(run())
    assert steps(tmp_path) == ["a 0", "a 1", "a 2", "a 3"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_turn_whose_process_died_is_taken_again_once(tmp_path: Path, victim: int) -> None:
    expected = undisturbed(tmp_path, 3)

    async def run() -> None:
        async with pool(DICE, str(tmp_path)) as envs:
            turns = [nth(number, "die" if number == victim else "roll") for number in range(3)]
            assert rewards(await played(envs, *turns)) == expected
            [failure] = await envs.step([nth(3, "die always")])
            assert isinstance(failure, EnvironmentFailure)
            assert failure.fault == "process"

    asyncio.run(run())
    assert steps(tmp_path)[-2:] == ["a 3", "a 3"]


def test_others_of_a_call_that_kills_its_process_resume(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, 2)

    async def run() -> None:
        async with pool(DICE, str(tmp_path), max_batch=3) as envs:
            await envs.step([nth(0, id=name) for name in "abc"])
            outcomes = await envs.step([nth(1, "die always" if name == "b" else "roll", name) for name in "abc"])
            assert [isinstance(each, EnvironmentFailure) for each in outcomes] == [False, True, False]
            assert rewards([each for each in outcomes if isinstance(each, StepResult)]) == [expected[1]] * 2

    asyncio.run(run())


def test_a_failing_turn_with_a_saved_state_is_retried_if_asked(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(DICE, str(tmp_path), retries=2) as envs:
            await played(envs, nth(0))
            [failure] = await envs.step([nth(1, "raise")])
            assert isinstance(failure, EnvironmentFailure)

    asyncio.run(run())
    assert steps(tmp_path) == ["a 0", "a 1", "a 1", "a 1"]


def test_a_conversation_resumes_in_another_pool(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)

    async def run() -> None:
        async with pool(DICE, str(tmp_path)) as envs:
            [_, second] = await played(envs, nth(0), nth(1))
        assert isinstance(second.state, KeptState)
        async with pool(DICE, str(tmp_path)) as envs:
            [unknown] = await envs.step([nth(2)])
            assert isinstance(unknown, EnvironmentFailure)
            assert unknown.fault == "lost"
            resumed = nth(2, id="b", resumption=Resumption(second.state.saved))
            assert rewards(await played(envs, resumed, nth(3, id="b"))) == expected[2:]

    asyncio.run(run())


def test_a_state_that_is_not_saved_is_lost_with_its_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(environment: str) -> None:
        async with pool(environment, str(tmp_path)) as envs:
            [first] = await played(envs, nth(0))
            assert first.state == KeptState(None)
            os.kill(first.info["pid"], signal.SIGKILL)
            [failure] = await envs.step([nth(1)])
            # the pool may notice before this turn or with it
            assert isinstance(failure, EnvironmentFailure)
            assert failure.fault in ("lost", "process")

    asyncio.run(run(FORGETFUL))
    caplog.set_level("INFO")
    asyncio.run(run(HUGE))
    assert "a saved state has 5.0 MiB and is not kept; the limit is 4 MiB" in caplog.text


def test_saved_states_need_an_environment_that_restores_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(FORGETFUL, str(tmp_path)) as envs:
            [failure] = await envs.step([nth(2, resumption=Resumption(b"{}"))])
            assert isinstance(failure, EnvironmentFailure)
            assert "no method `restore`" in failure.reason
        async with pool("saving_environments:Half") as envs:
            with pytest.raises(WorkerError, match="no method `restore`"):
                await envs.start()

    asyncio.run(run())


def test_an_object_per_conversation_resumes() -> None:
    async def run() -> None:
        async with pool("saving_environments:Remembering") as envs:
            [first] = await played(envs, nth(0, "x"))
        assert isinstance(first.state, KeptState)
        async with pool("saving_environments:Remembering") as envs:
            resumed = nth(1, "y", "b", resumption=Resumption(first.state.saved))
            [second, last] = await played(envs, resumed, nth(2, "end", "b"))
            assert second.observation[0]["content"] == "[('x', 7), ('y', 7)]"
            assert last.reward == 3.0

    asyncio.run(run())


def test_the_state_of_tools_resumes() -> None:
    def call(text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("note", {"text": text}, "1"),)

    async def run() -> None:
        async with pool("saving_environments:notebook") as envs:
            [first] = await played(envs, nth(0, "", tool_calls=call("one")))
        assert isinstance(first.state, KeptState)
        async with pool("saving_environments:notebook") as envs:
            again = nth(1, "", "b", tool_calls=call("two"), resumption=Resumption(first.state.saved))
            [second, last] = await played(envs, again, nth(2, "done", "b"))
            assert second.observation[0]["content"] == "one two"
            assert last.rewards()["reward"] == 2.0
            assert last.info["tool_calls"] == 2

    asyncio.run(run())
