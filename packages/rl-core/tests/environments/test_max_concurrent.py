"""The bound on the conversations that an environment has under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from pools import failures, pool, turn

from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.pool import EnvironmentPool


@pytest.mark.parametrize("max_batch", [1, 4])
def test_no_more_conversations_are_under_way_than_the_bound(tmp_path: Path, max_batch: int) -> None:
    async def run() -> None:
        settings = {"workers": 2, "max_batch": max_batch, "max_concurrent": 3}
        async with pool("pool_environments:Tally", str(tmp_path), **settings) as envs:
            seen: list[float] = []
            num_begun = 0
            three_began = asyncio.Event()

            async def play(index: int) -> None:
                nonlocal num_begun
                for number, completion in enumerate(("go", "go", "end")):
                    [result] = await envs.step([replace(turn(index, completion), turn=number)])
                    seen.append(result.reward)
                    num_begun += number == 0
                    if num_begun == 3:
                        three_began.set()
                    # so that as many as may are under way before the first of them ends
                    await three_began.wait()

            await asyncio.gather(*(play(index) for index in range(9)))
            assert len(seen) == 27
            assert max(seen) == 3.0
        assert list(tmp_path.iterdir()) == []

    asyncio.run(run())


def test_conversations_without_a_state_count_while_they_are_in_a_call(tmp_path: Path) -> None:
    async def run() -> None:
        async with pool(workers=1, max_batch=8, max_concurrent=2) as envs:
            results = await envs.step([turn(index, "say a") for index in range(8)])
            assert max(result.info["size"] for result in results) <= 2

    asyncio.run(run())


@pytest.mark.parametrize("end", ["abandon", "release", "raise no", "kill"])
def test_a_conversation_that_is_given_up_or_fails_makes_room(end: str) -> None:
    async def run() -> None:
        async with pool(workers=2, max_concurrent=1) as envs:
            await envs.step([turn(0, "count")], "first")
            waiting = asyncio.create_task(envs.step([turn(1, "say abc")], "second"))
            await envs.step([replace(turn(0, "count"), turn=1)], "first")
            assert not waiting.done()
            if end == "abandon":
                await envs.abandon(["0"])
            elif end == "release":
                await envs.release("first")
                with pytest.raises(RuntimeError, match="its process had ended"):
                    await envs.step([turn(2, "count")], "first")
            else:
                assert failures(await envs.step([replace(turn(0, end), turn=2)])) == [0]
            [result] = await waiting
            assert result.reward == 3.0

    asyncio.run(run())


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrent must be positive or None, got 0"):
        EnvironmentPool("pool_environments:Tally", None, num_workers=1, deadline_s=1.0, max_concurrent=0)
    with pytest.raises(ValueError, match="max_concurrent"):
        EnvironmentConfig(max_concurrent=0)
