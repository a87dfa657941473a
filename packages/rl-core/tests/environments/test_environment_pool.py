from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pools import OBEDIENT, ScaledConfig, eventually, failures, is_running, pool, turn

from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.pool import EnvironmentPool, default_num_workers
from rl_core.errors import WorkerDied, WorkerError
from rl_core.rollouts.environment import EnvironmentFailure, KeptState, StepResult


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
                    assert result.state == KeptState()
                    pids.setdefault(str(i), set()).add(result.info["pid"])
            assert all(len(homes) == 1 for homes in pids.values())
            assert [result.reward for result in await envs.step([turn(i, "end") for i in range(6)])] == [3.0] * 6
            assert [result.reward for result in await envs.step([turn(0, "count")])] == [1]

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


def test_settings_that_a_function_would_never_see_are_refused() -> None:
    async def scenario() -> None:
        async with pool("pool_environments:length", ScaledConfig()) as envs:
            with pytest.raises(WorkerError, match="is a function and takes no settings, but its config has scale"):
                await envs.start()
        async with pool("pool_environments:length", EnvironmentConfig()) as envs:
            assert [outcome.reward for outcome in await envs.step([turn(0, "four")])] == [4.0]

    asyncio.run(scenario())


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
from pools import OBEDIENT, turn

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
                assert "sent a malformed answer" in outcome.reason

    asyncio.run(run())
    assert not (tmp_path / "unpickled").exists()


def test_what_a_process_prints_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with pool() as envs:
            [result] = await envs.step([turn(0, "print seen by none")])
            assert isinstance(result, StepResult)
            line = f"{OBEDIENT}, process {result.info['pid']}: seen by none"
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
            assert "its rollout was silent for too long" in lost.reason

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
            [said, slow, raised] = await envs.step_within(0.1, [turn(i, word) for i, word in enumerate(words)])
            while said is None or raised is None:
                [slow] = await envs.late(0.1, ["1"])
                said = said or (await envs.late(0.1, ["0"]))[0]
                raised = raised or (await envs.late(0.1, ["2"]))[0]
            assert isinstance(said, StepResult)
            assert slow is None
            assert isinstance(raised, EnvironmentFailure)
            go.touch()
            late, unknown = await envs.late(60.0, ["1", "0"])
            assert isinstance(late, StepResult)
            assert isinstance(unknown, EnvironmentFailure)

    asyncio.run(run())
