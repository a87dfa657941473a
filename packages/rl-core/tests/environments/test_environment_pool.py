from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pickle
import resource
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
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.pool import EnvironmentPool, default_num_workers
from rl_core.errors import WorkerDied, WorkerError

OBEDIENT = "pool_environments:Obedient"


def turn(id: Any, completion: str) -> Conversation:
    return Conversation(
        id=str(id), messages=({"role": "user", "content": "?"},), info={"answer": "1"}, completion=completion
    )


@asynccontextmanager
async def pool(
    environment: str = OBEDIENT, config: Any = None, *, workers: int = 1, deadline_s: float = 120.0, **settings: Any
) -> AsyncIterator[EnvironmentPool]:
    opened = EnvironmentPool(environment, config, num_workers=workers, deadline_s=deadline_s, **settings)
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


async def eventually(condition: Any, timeout_s: float = 60.0) -> None:
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
            await envs.start()
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


@pytest.mark.parametrize("max_batch", [1, 64])
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("hang", "it was in wait (threading.py:"),
        ("exit", "exit code 7"),
        ("kill", "SIGKILL"),
        ("abort", "signal SIGABRT in _step (pool_environments.py:"),
        ("spin 900000000", "it was in _step (pool_environments.py:"),
    ],
)
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
            assert OBEDIENT in outcomes[3].reason
            if "it was in" in says:
                assert "within its deadline of 5 s (env.judge.deadline_s)" in outcomes[3].reason
            assert (await envs.health())["num_restarts"] == (1 if max_batch == 1 else 2)
            assert failures(await envs.step([turn("next", "say a")])) == []

    with caplog.at_level(logging.WARNING, logger="rl_core"):
        asyncio.run(run())
    assert len(caplog.records) == (1 if max_batch == 1 else 2)


def test_healthy_turns_do_not_wait_for_those_that_hang(tmp_path: Path) -> None:
    hanging = {3, 4, 9, 17, 30}
    ended: list[int] = []

    async def run() -> None:
        async with pool(config=str(tmp_path), workers=2, deadline_s=5.0) as envs:
            await envs.start()

            async def one(i: int) -> None:
                [outcome] = await envs.step([turn(i, "hang" if i in hanging else "say a")])
                assert isinstance(outcome, EnvironmentFailure) == (i in hanging)
                ended.append(i)

            await asyncio.gather(*(one(i) for i in range(40)))
            # a turn is at most twice begun, and once waited for up to the deadline
            assert (await envs.health())["num_restarts"] == len(hanging)

    asyncio.run(run())
    assert set(ended[-len(hanging) :]) == hanging
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
        async with pool(config=str(tmp_path), deadline_s=100.0) as envs:
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


def test_states_of_abandoned_conversations_are_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    async def run() -> None:
        async with pool(config=str(tmp_path)) as envs:
            await envs.step([turn(0, "count"), turn(1, "count")])
            await envs.step([turn(1, "count")])
            await envs.abandon(["1", "unknown"])
            await eventually(lambda: closed.exists() and closed.read_text() == "2\n")
            assert (await envs.health())["num_conversations"] == 1
        assert closed.read_text() == "2\n1\n"

    asyncio.run(run())


def test_a_cancelled_step_abandons_its_conversations(tmp_path: Path) -> None:
    closed, go, waits = tmp_path / "closed", tmp_path / "go", tmp_path / "waits"

    async def run() -> None:
        async with pool(config=str(tmp_path)) as envs:
            await envs.start()
            task = asyncio.create_task(envs.step([turn("a", f"await {go}"), turn("b", "count")]))
            other = asyncio.create_task(envs.step([turn("c", "count")]))
            await eventually(waits.exists)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.touch()
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
        ("pool_environments:HungryWhileBuilt", WorkerError, "its memory limit of 1 GiB"),
    ],
)
def test_an_environment_that_cannot_be_built_is_an_error(environment: str, error: type[Exception], says: str) -> None:
    async def run() -> None:
        async with pool(environment, memory_limit_gib=1.0) as envs:
            with pytest.raises(error, match=says):
                await envs.start()
            with pytest.raises(error, match=says):
                await envs.step([turn(0, "say a")])
            with pytest.raises(error, match=says):
                await envs.health()

    asyncio.run(run())


def test_one_step_at_a_time_and_none_after_close(tmp_path: Path) -> None:
    go, waits, hung = tmp_path / "go", tmp_path / "waits", tmp_path / "hung"

    async def run() -> None:
        async with pool(config=str(tmp_path)) as envs:
            with pytest.raises(ValueError, match="one step at a time"):
                await envs.step([turn(0, "say a"), turn(0, "say b")])
            under_way = asyncio.create_task(envs.step([turn(0, f"await {go}")]))
            await eventually(waits.exists)
            with pytest.raises(ValueError, match="one step at a time"):
                await envs.step([turn(0, "say a")])
            go.touch()
            assert failures(await under_way) == []
            stuck = asyncio.create_task(envs.step([turn(1, "hang")]))
            queued = asyncio.create_task(envs.step([turn(2, "say a")]))
            await eventually(hung.exists)
            await envs.close()
            for step in (stuck, queued):
                with pytest.raises(RuntimeError, match="closed"):
                    await step
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
    pool = EnvironmentPool(OBEDIENT, None, num_workers=1, deadline_s=1000)
    [result] = await pool.step([turn(0, "say a")])
    task = asyncio.create_task(pool.step([turn(1, {busy_with!r})]))
    await asyncio.sleep(0.3)
    print(result.info["pid"], flush=True)
    await asyncio.sleep(1000)

asyncio.run(run())
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    until = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < until, "the environment's process outlived its parent"
        time.sleep(0.02)


def test_thousands_of_concurrent_steps() -> None:
    async def run() -> None:
        async with pool(workers=2) as envs:
            outcomes = await asyncio.gather(*(envs.step([turn(i, "say abc")]) for i in range(3_000)))
            assert all(outcome[0].reward == 3.0 for outcome in outcomes)

    asyncio.run(run())


def test_a_process_imports_only_what_the_environment_needs() -> None:
    code = "import sys, rl_core.environments.process\nprint({'asyncio', 'pydantic', 'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("wrong", [{"num_workers": 0}, {"deadline_s": 0.0}, {"max_batch": 0}])
def test_sizes_must_be_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive"):
        EnvironmentPool(OBEDIENT, None, **{"num_workers": 1, "deadline_s": 1.0, **wrong})


def test_processes_do_not_see_the_secrets_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "hf", "WANDB_API_KEY": "key", "AWS_SECRET_ACCESS_KEY": "aws", "MY_JUDGE": "mine"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)

    async def run() -> None:
        async with pool(env_vars={"JUDGE_KEY": "given", "TZ": "UTC+1"}) as envs:
            [result] = await envs.step([turn(0, "variables")])
            assert isinstance(result, StepResult)
            seen = result.info["variables"]
            assert not set(secrets) & set(seen)
            assert seen["PATH"] == os.environ["PATH"]
            assert (seen["JUDGE_KEY"], seen["TZ"]) == ("given", "UTC+1")

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


def test_without_a_limit_memory_is_the_nodes() -> None:
    async def run() -> None:
        async with pool() as envs:
            [result] = await envs.step([turn(0, "limits")])
            assert isinstance(result, StepResult)
            assert result.info["data"] == resource.getrlimit(resource.RLIMIT_DATA)

    asyncio.run(run())


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_nothing_that_a_process_sends_is_unpickled_or_believed(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "unpickled"))
    forged = [f"forge {bomb.hex()}", "forge c1", "forge 93010203", "forge ", f"promise {2**60}"]

    async def run() -> None:
        async with pool("pool_environments:Forger") as envs:
            words = ["say a", *forged, "say b"]
            outcomes = await envs.step([turn(i, word) for i, word in enumerate(words)])
            assert failures(outcomes) == [1, 2, 3, 4, 5]
            for outcome in outcomes[1:-1]:
                assert "sent something that is not an answer" in outcome.reason

    asyncio.run(run())
    assert not (tmp_path / "unpickled").exists()


def test_what_a_process_prints_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with pool() as envs:
            [result] = await envs.step([turn(0, "print seen by none")])
            assert isinstance(result, StepResult)
            line = f"process {result.info['pid']}: seen by none"
            await eventually(lambda: line in caplog.messages)
            [failure] = await envs.step([turn(0, "shout the\nlast words")])
            assert isinstance(failure, EnvironmentFailure)
            assert "exit code 7, after it wrote 'last words'" in failure.reason

    with caplog.at_level(logging.INFO, logger="rl_core"):
        asyncio.run(run())
    assert any(message.endswith(": the") for message in caplog.messages)


def test_a_process_that_prints_without_end_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with pool() as envs:
            await envs.step([turn(i, "print " + "x" * 100_000) for i in range(20)])
            assert failures(await envs.step([turn(0, "say a")])) == []
            await eventually(lambda: any("the rest is dropped" in message for message in caplog.messages))

    with caplog.at_level(logging.INFO, logger="rl_core"):
        asyncio.run(run())
    assert sum(map(len, caplog.messages)) < 2 * 2**20


def test_conversations_of_a_client_that_vanished_are_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    async def run() -> None:
        # long enough for a turn on a loaded machine
        async with pool(config=str(tmp_path), lease_s=5.0) as envs:
            await envs.start()
            await envs.step([turn(0, "count"), turn(1, "count")], "vanished")
            await envs.step([turn(2, "count")])
            await eventually(lambda: closed.exists() and closed.read_text() == "1\n1\n")
            assert (await envs.health())["num_conversations"] == 1
            later = dataclasses.replace(turn(0, "count"), turn=1)
            [lost] = await envs.step([later], "vanished")
            assert isinstance(lost, EnvironmentFailure)
            assert "nothing was heard of its rollout" in lost.reason

    asyncio.run(run())


def test_a_turn_under_way_of_a_client_that_vanished_leaves_no_state(tmp_path: Path) -> None:
    go, waits, closed = tmp_path / "go", tmp_path / "waits", tmp_path / "closed"

    async def run() -> None:
        async with pool(config=str(tmp_path), lease_s=0.2) as envs:
            first = asyncio.create_task(envs.step([turn("other", f"await {go}")]))
            await eventually(waits.exists)
            task = asyncio.create_task(envs.step([turn(0, "count")], "vanished"))
            await asyncio.sleep(0)
            while (await envs.health())["num_conversations"] > 1:
                await asyncio.sleep(0.02)
            go.touch()
            await first
            [outcome] = await task
            assert isinstance(outcome, EnvironmentFailure)
            assert (await envs.health())["num_conversations"] == 0

    asyncio.run(run())
    assert not closed.exists()


def test_settings_make_a_pool() -> None:
    async def run() -> None:
        config = EnvironmentConfig(num_workers=2, memory_limit_gib=1.0, env_vars={"JUDGE_KEY": "x"})
        envs = EnvironmentPool.of("pool_environments:Obedient", config, name="judge")
        try:
            # the environment gets the settings as they are; this one takes them for the name of a folder
            [result] = await envs.step([turn(0, "variables")])
            assert isinstance(result, StepResult)
            assert result.info["variables"]["JUDGE_KEY"] == "x"
            assert (await envs.health())["num_workers"] == 2
        finally:
            await envs.close()

    asyncio.run(run())
    assert EnvironmentConfig().num_workers is None
    assert 1 <= default_num_workers() <= 8


def test_outcomes_of_a_call_are_there_before_its_last(tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def run() -> None:
        async with pool(config=str(tmp_path), workers=2) as envs:
            await envs.start()
            words = ["say a", f"await {go}", "raise it"]
            outcomes = await envs.step_within(10.0, [turn(i, word) for i, word in enumerate(words)])
            assert isinstance(outcomes[0], StepResult)
            assert outcomes[1] is None
            assert isinstance(outcomes[2], EnvironmentFailure)
            go.touch()
            late, unknown = await envs.late(60.0, ["1", "0"])
            assert isinstance(late, StepResult)
            assert isinstance(unknown, EnvironmentFailure)

    asyncio.run(run())
