"""Turns that hang, crash, take long or need too much memory cost their own conversations."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from pools import eventually, failures, is_running, pool, turn

from rl_core.rollouts.environment import EnvironmentFailure, StepResult
from rl_core.testing.exhaustive import partly_exhaustive


def test_only_those_fail_whose_step_raises() -> None:
    async def run() -> None:
        async with pool() as envs:
            words = ["say a", "raise one bad", "say b", "raise another", "say c"]
            outcomes = await envs.step([turn(i, word) for i, word in enumerate(words)])
            assert failures(outcomes) == [1, 3]
            assert "ValueError: one bad" in outcomes[1].reason
            assert "pool_environments.py:" in outcomes[1].reason
            assert (await envs.health())["num_restarts"] == 0

    asyncio.run(run())


WAYS = [
    ("hang", "it was in _step (pool_environments.py:", 1),
    ("hang", "it was in _step (pool_environments.py:", 64),
    ("exit", "exit code 7", 1),
    ("exit", "exit code 7", 64),
    ("kill", "SIGKILL", 1),
    ("kill", "SIGKILL", 64),
    ("abort", "signal SIGABRT in _step (pool_environments.py:", 1),
    ("abort", "signal SIGABRT in _step (pool_environments.py:", 64),
    ("spin 900000000", "it was in _step (pool_environments.py:", 1),
]
"""What a turn does, what is said of it, and the size of batches."""


@pytest.mark.parametrize(("word", "says", "max_batch"), partly_exhaustive(WAYS, always=[WAYS[1], WAYS[2], WAYS[7]]))
def test_a_hang_or_a_crash_costs_its_own_conversation_only(
    word: str, says: str, max_batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        # long enough for every other turn on a loaded machine
        async with pool(deadline_s=5.0, max_batch=max_batch, name="judge") as envs:
            await envs.start()
            outcomes = await envs.step([turn(i, word if i == 3 else "say a") for i in range(8)])
            assert failures(outcomes) == [3]
            assert says in outcomes[3].reason
            assert "environment judge" in outcomes[3].reason
            if "it was in" in says:
                assert "within its deadline of 5 s (env.judge.deadline_s)" in outcomes[3].reason
            health = await envs.health()
            assert health["num_restarts"] == (1 if max_batch == 1 else 2)
            assert says in health["restart_reason"]
            assert failures(await envs.step([turn("next", "say a")])) == []

    with caplog.at_level(logging.WARNING, logger="rl_core"):
        asyncio.run(run())
    assert len(caplog.records) == (1 if max_batch == 1 else 2)


def test_healthy_turns_do_not_wait_for_slow_ones(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(config=str(tmp_path), workers=2, deadline_s=60.0) as envs:
            await envs.start()
            go, waits = tmp_path / "go", tmp_path / "waits"
            slow = {i: asyncio.create_task(envs.step([turn(i, f"await {go}")])) for i in (3, 4, 17)}
            healthy = [asyncio.create_task(envs.step([turn(i, "say a")])) for i in range(40) if i not in slow]
            for step in healthy:
                assert failures(await step) == []
            assert not any(step.done() for step in slow.values())
            go.touch()
            for step in slow.values():
                assert failures(await step) == []
            begun = waits.read_text().split()
            assert max(begun.count(str(i)) for i in slow) <= 2
            assert (await envs.health())["num_restarts"] == 0

    asyncio.run(run())


def test_a_turn_that_hangs_is_begun_twice_at_most_and_waited_for_once(tmp_path: Path) -> None:
    hanging = {3, 4, 17}

    async def run() -> None:
        # long enough for every other turn on a loaded machine
        async with pool(config=str(tmp_path), workers=2, deadline_s=5.0) as envs:
            await envs.start()
            outcomes = await envs.step([turn(i, "hang" if i in hanging else "say a") for i in range(20)])
            assert set(failures(outcomes)) == hanging
            assert (await envs.health())["num_restarts"] == len(hanging)

    asyncio.run(run())
    hung = (tmp_path / "hung").read_text().split()
    assert max(hung.count(str(i)) for i in hanging) <= 2


def test_turns_that_hang_are_waited_for_side_by_side(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(config=str(tmp_path), workers=3, deadline_s=5.0) as envs:
            await envs.start()
            hung = tmp_path / "hung"
            stepping = asyncio.create_task(envs.step([turn(i, "hang") for i in range(3)]))
            await eventually(lambda: hung.exists() and len(hung.read_text().split()) == 3)
            assert not stepping.done()
            assert failures(await stepping) == [0, 1, 2]

    asyncio.run(run())


def test_a_slow_turn_is_answered_after_it_gave_way(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(config=str(tmp_path), deadline_s=60.0) as envs:
            await envs.start()
            go, waits = tmp_path / "go", tmp_path / "waits"
            slow = asyncio.create_task(envs.step([turn("slow", f"await {go}")]))
            await eventually(waits.exists)
            assert failures(await envs.step([turn("quick", "say a")])) == []
            assert not slow.done()
            go.touch()
            assert failures(await slow) == []
            assert waits.read_text().split() == ["slow", "slow"]
            assert (await envs.health())["num_restarts"] == 0

    asyncio.run(run())


def test_a_slow_turn_gives_way_to_nobody_whose_process_has_states(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(config=str(tmp_path), deadline_s=60.0) as envs:
            await envs.step([turn("other", "count")])
            go, waits = tmp_path / "go", tmp_path / "waits"
            slow = asyncio.create_task(envs.step([turn("slow", f"await {go}")]))
            await eventually(waits.exists)
            quick = asyncio.create_task(envs.step([turn("quick", "say a")]))
            # longer than a slow turn is waited for before it gives way, a tenth of the deadline
            await asyncio.sleep(8.0)
            go.touch()
            assert failures(await slow) == failures(await quick) == []
            assert [r.reward for r in await envs.step([turn("other", "count")])] == [2]

    asyncio.run(run())


def test_a_crash_fails_conversations_whose_state_it_took() -> None:
    async def run() -> None:
        async with pool(max_batch=64) as envs:
            await envs.step([turn("shared", "count"), turn("idle", "count")])
            outcomes = await envs.step([turn("shared", "exit"), turn("fresh", "say a")])
            assert failures(outcomes) == [0]
            assert "exit code 7" in outcomes[0].reason
            [idle] = await envs.step([turn("idle", "count")])
            assert isinstance(idle, EnvironmentFailure)
            assert "state lost" in idle.reason
            assert "exit code 7" in idle.reason
            assert [r.reward for r in await envs.step([turn("idle", "count")])] == [1]

    asyncio.run(run())


def test_a_process_that_dies_while_idle_costs_no_stateless_conversation() -> None:
    async def run() -> None:
        async with pool() as envs:
            [result] = await envs.step([turn(0, "say a")])
            os.kill(result.info["pid"], signal.SIGKILL)
            await eventually(lambda: not is_running(result.info["pid"]))
            assert failures(await envs.step([turn(1, "say a")])) == []

    asyncio.run(run())


def test_a_turn_that_needs_too_much_memory_costs_its_own_conversation() -> None:
    async def run() -> None:
        async with pool(memory_limit_gib=0.5, max_batch=64, name="hungry") as envs:
            outcomes = await envs.step([turn(0, "need 400"), turn(1, "need 600"), turn(2, "say a")])
            assert failures(outcomes) == [1]
            assert "needed more than its memory limit of 0.5 GiB (env.hungry.memory_limit_gib)" in outcomes[1].reason
            [result] = await envs.step([turn(0, "limits")])
            assert isinstance(result, StepResult)
            assert result.info["core"] == (0, 0)
            assert result.info["data"] == (2**29, 2**29)

    asyncio.run(run())


def test_an_environment_that_leaks_memory_costs_no_conversation() -> None:
    async def run() -> None:
        async with pool(memory_limit_gib=0.5) as envs:
            assert failures(await envs.step([turn(i, "keep 120") for i in range(10)])) == []
            assert (await envs.health())["num_restarts"] >= 2

    asyncio.run(run())


@pytest.mark.parametrize(("retries", "failed"), [(0, [0]), (1, [0]), (2, [])])
def test_a_turn_that_fails_is_tried_again_as_often_as_the_settings_say(
    retries: int, failed: list[int], tmp_path: Path
) -> None:
    async def run() -> None:
        async with pool(config=str(tmp_path), retries=retries) as envs:
            assert failures(await envs.step([turn(0, "fail 2")])) == failed
        assert len((tmp_path / "failed").read_text().splitlines()) == retries + 1

    asyncio.run(run())


def test_a_turn_whose_process_ends_is_tried_again_in_another() -> None:
    async def run() -> None:
        async with pool(retries=1) as envs:
            assert failures(await envs.step([turn(0, "exit"), turn(1, "say a")])) == [0]
            assert (await envs.health())["num_restarts"] == 2

    asyncio.run(run())


def test_a_conversation_with_a_state_is_not_tried_again() -> None:
    async def run() -> None:
        async with pool(retries=3) as envs:
            await envs.step([turn(0, "count")])
            [outcome] = await envs.step([turn(0, "raise spoilt")])
            assert isinstance(outcome, EnvironmentFailure)
            assert (await envs.health())["num_conversations"] == 0

    asyncio.run(run())
