from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_core.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.environments.pool import EnvironmentPool
from rl_core.errors import WorkerDied, WorkerError

OBEDIENT = "pool_environments:Obedient"


def turn(id: Any, completion: str) -> Conversation:
    return Conversation(
        id=str(id), messages=({"role": "user", "content": "?"},), info={"answer": "1"}, completion=completion
    )


@asynccontextmanager
async def pool(
    environment: str = OBEDIENT, config: Any = None, *, workers: int = 1, deadline_s: float = 20.0, max_batch: int = 64
) -> AsyncIterator[EnvironmentPool]:
    opened = EnvironmentPool(environment, config, num_workers=workers, deadline_s=deadline_s, max_batch=max_batch)
    try:
        yield opened
    finally:
        await opened.close()


def failures(outcomes: list[StepResult | EnvironmentFailure]) -> list[int]:
    return [index for index, outcome in enumerate(outcomes) if isinstance(outcome, EnvironmentFailure)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def eventually(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_conversation_whose_pool_died_fails_and_is_not_begun_anew() -> None:
    async def run() -> None:
        later = dataclasses.replace(turn("a", "right"), turn=1)
        async with pool() as envs:
            first, lost = await envs.step([turn("b", "right"), later])
            assert isinstance(first, StepResult)
            assert isinstance(lost, EnvironmentFailure)
            assert "state is lost" in lost.reason

    asyncio.run(run())


def test_outcomes_come_in_order_and_from_other_processes() -> None:
    async def run() -> None:
        async with pool(workers=2) as envs:
            results = await envs.step([turn(i, "say " + "x" * i) for i in range(200)])
            assert [result.reward for result in results] == list(range(200))
            pids = {result.info["pid"] for result in results}
            assert len(pids) == 2
            assert os.getpid() not in pids
            assert (await envs.health())["num_conversations"] == 0

    asyncio.run(run())


def test_a_scoring_function_is_an_environment() -> None:
    async def run() -> None:
        async with pool("pool_environments:length") as envs:
            assert [result.reward for result in await envs.step([turn(0, "four"), turn(1, "")])] == [4.0, 0.0]

    asyncio.run(run())


def test_no_conversations_no_outcomes() -> None:
    async def run() -> None:
        async with pool() as envs:
            assert await envs.step([]) == []

    asyncio.run(run())


def test_what_is_queued_travels_together_up_to_the_cap() -> None:
    async def run() -> None:
        async with pool(max_batch=8) as envs:
            results = await asyncio.gather(*(envs.step([turn(i, "say hi")]) for i in range(50)))
            sizes = [result[0].info["size"] for result in results]
            assert max(sizes) == 8
            assert sum(size == 8 for size in sizes) >= 40

    asyncio.run(run())


def test_a_conversation_sticks_to_its_process_and_keeps_its_state_there() -> None:
    async def run() -> None:
        async with pool(workers=2) as envs:
            pids: dict[str, set[int]] = {}
            for number in range(1, 4):
                results = await envs.step([turn(i, "count") for i in range(6)])
                for i, result in enumerate(results):
                    assert result.reward == number
                    assert result.state is None
                    pids.setdefault(str(i), set()).add(result.info["pid"])
            assert all(len(homes) == 1 for homes in pids.values())
            assert len(set().union(*pids.values())) == 2
            assert [result.reward for result in await envs.step([turn(i, "end") for i in range(6)])] == [3.0] * 6
            assert [result.reward for result in await envs.step([turn(0, "count")])] == [1]

    asyncio.run(run())


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


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("hang", "within its deadline of 1 s"),
        ("exit", "exit code 7"),
        ("kill", "SIGKILL"),
        ("spin 900000000", "within its deadline of 1 s"),
    ],
)
def test_a_hang_or_a_crash_costs_its_own_conversation_only(
    word: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with pool(deadline_s=1.0) as envs:
            outcomes = await envs.step([turn(i, word if i == 3 else "say a") for i in range(8)])
            assert failures(outcomes) == [3]
            assert says in outcomes[3].reason
            assert OBEDIENT in outcomes[3].reason
            assert (await envs.health())["num_restarts"] == 2
            assert failures(await envs.step([turn("next", "say a")])) == []

    with caplog.at_level(logging.WARNING, logger="rl_core"):
        asyncio.run(run())
    assert len(caplog.records) == 2


def test_a_crash_fails_conversations_whose_state_it_took() -> None:
    async def run() -> None:
        async with pool() as envs:
            await envs.step([turn("shared", "count"), turn("idle", "count")])
            outcomes = await envs.step([turn("shared", "count"), turn("fresh", "say a"), turn("bad", "exit")])
            assert failures(outcomes) == [0, 2]
            assert "shared" in outcomes[0].reason
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


def test_states_of_abandoned_conversations_are_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    async def run() -> None:
        async with pool(config=str(tmp_path)) as envs:
            await envs.step([turn(0, "count"), turn(1, "count")])
            await envs.step([turn(1, "count")])
            await envs.abandon(["1", "unknown"])
            await eventually(closed.exists)
            assert closed.read_text() == "2\n"
            assert (await envs.health())["num_conversations"] == 1
        assert closed.read_text() == "2\n1\n"

    asyncio.run(run())


def test_a_cancelled_step_abandons_its_conversations(tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    async def run() -> None:
        async with pool(config=str(tmp_path), max_batch=1) as envs:
            await envs.start()
            task = asyncio.create_task(envs.step([turn("a", "sleep 0.3"), turn("b", "count")]))
            other = asyncio.create_task(envs.step([turn("c", "count")]))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other)[0].reward == 1
            assert (await envs.health())["num_conversations"] == 1
            assert [r.reward for r in await envs.step([turn("b", "count")])] == [1]

    asyncio.run(run())
    assert sorted(closed.read_text().split()) == ["1", "1"]


def test_what_cannot_cross_processes_fails_its_conversation() -> None:
    async def run() -> None:
        async with pool() as envs:
            outcomes = await envs.step([turn(0, "foreign"), turn(1, "say a"), turn(2, "nan")])
            assert failures(outcomes) == [0, 2]
            assert "info['oops'] holds a object" in outcomes[0].reason
            assert "finite" in outcomes[2].reason

    asyncio.run(run())


def test_a_wrong_number_of_results_is_a_failure() -> None:
    async def run() -> None:
        async with pool("pool_environments:Short") as envs:
            outcomes = await envs.step([turn(0, "say a"), turn(1, "say a")])
            assert failures(outcomes) == [0, 1]
            assert "0 results for 1 conversations" in outcomes[0].reason

    asyncio.run(run())


@pytest.mark.parametrize(
    ("environment", "error", "says"),
    [
        ("pool_environments:Unbuildable", WorkerError, "no such verifier"),
        ("pool_environments:Missing", WorkerError, "Missing"),
        ("no_such_module:Environment", WorkerError, "no_such_module"),
        ("pool_environments:EndsWhileBuilt", WorkerDied, "exit code 9"),
    ],
)
def test_an_environment_that_cannot_be_built_is_an_error(environment: str, error: type[Exception], says: str) -> None:
    async def run() -> None:
        async with pool(environment) as envs:
            with pytest.raises(error, match=says):
                await envs.start()
            with pytest.raises(error, match=says):
                await envs.step([turn(0, "say a")])
            with pytest.raises(error, match=says):
                await envs.health()

    asyncio.run(run())


def test_one_step_at_a_time_and_none_after_close() -> None:
    async def run() -> None:
        async with pool() as envs:
            with pytest.raises(ValueError, match="one step at a time"):
                await envs.step([turn(0, "say a"), turn(0, "say b")])
            under_way = asyncio.create_task(envs.step([turn(0, "sleep 0.2")]))
            await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="one step at a time"):
                await envs.step([turn(0, "say a")])
            assert failures(await under_way) == []
            stuck = asyncio.create_task(envs.step([turn(1, "hang")]))
            await asyncio.sleep(0.05)
            await envs.close()
            with pytest.raises(RuntimeError, match="closed"):
                await stuck
            await envs.close()
            with pytest.raises(RuntimeError, match="closed"):
                await envs.step([turn(2, "say a")])

    asyncio.run(run())


def test_close_ends_the_processes() -> None:
    async def run() -> None:
        async with pool(workers=2) as envs:
            results = await envs.step([turn(i, "say a") for i in range(2)])
        assert not any(is_running(result.info["pid"]) for result in results)

    asyncio.run(run())


@pytest.mark.parametrize("busy_with", ["say a", "hang", "spin 900000000"])
def test_processes_end_with_their_parent_however_that_ends(busy_with: str) -> None:
    script = f"""
import asyncio
from rl_core.environments.pool import EnvironmentPool
from test_environment_pool import OBEDIENT, turn

async def run():
    pool = EnvironmentPool(OBEDIENT, None, num_workers=1, deadline_s=100)
    [result] = await pool.step([turn(0, "say a")])
    task = asyncio.create_task(pool.step([turn(1, {busy_with!r})]))
    await asyncio.sleep(0.3)
    print(result.info["pid"], flush=True)
    await asyncio.sleep(100)

asyncio.run(run())
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    until = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < until, "the environment's process outlived its parent"
        time.sleep(0.02)


def test_ten_thousand_concurrent_steps() -> None:
    async def run() -> float:
        async with pool(workers=2) as envs:
            await envs.start()
            begin = time.monotonic()
            outcomes = await asyncio.gather(*(envs.step([turn(i, "say abc")]) for i in range(10_000)))
            assert all(outcome[0].reward == 3.0 for outcome in outcomes)
            return 10_000 / (time.monotonic() - begin)

    assert asyncio.run(run()) > 1000  # generous: a loaded machine with two cores


def test_a_process_imports_only_what_the_environment_needs() -> None:
    code = "import sys, rl_core.environments.process\nprint({'asyncio', 'pydantic', 'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("wrong", [{"num_workers": 0}, {"deadline_s": 0.0}, {"max_batch": 0}])
def test_sizes_must_be_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive"):
        EnvironmentPool(OBEDIENT, None, **{"num_workers": 1, "deadline_s": 1.0, **wrong})
