from __future__ import annotations

import asyncio

import pytest

from rl_core.errors import GeneratorError
from rl_core.rollouts.lifecycle import Admission


def open_admission() -> Admission:
    admission = Admission("not yet")
    admission.refuse("")
    return admission


async def visit(admission: Admission, seconds: float = 0.0, *, while_paused: bool = False) -> str:
    async with admission.passage(while_paused=while_paused):
        await asyncio.sleep(seconds)
    return "served"


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_pause_lets_those_inside_finish_and_later_ones_wait() -> None:
    async def scene() -> None:
        admission = open_admission()
        inside = asyncio.create_task(visit(admission, 0.02))
        await settled()
        await admission.pause()
        assert inside.done()
        late = asyncio.create_task(visit(admission))
        await settled()
        assert (late.done(), admission.num_waiting) == (False, 1)
        assert await visit(admission, while_paused=True) == "served"
        admission.resume()
        assert await late == "served"
        assert (admission.num_inside, admission.num_waiting) == (0, 0)

    asyncio.run(scene())


def test_a_pause_that_interrupts_asks_the_engine_until_nobody_is_inside() -> None:
    async def scene() -> None:
        admission = open_admission()
        known: list[asyncio.Event] = []

        async def request(number: int) -> str:
            ended = asyncio.Event()
            async with admission.passage():
                if number:  # it is not in the engine yet when that is asked for the first time
                    await asked.wait()
                known.append(ended)
                await ended.wait()
            return "interrupted"

        async def interrupt() -> None:
            for ended in known:
                ended.set()
            asked.set()

        asked = asyncio.Event()
        requests = [asyncio.create_task(request(number)) for number in range(2)]
        await settled()
        await asyncio.wait_for(admission.pause(interrupt), 60)
        assert [await each for each in requests] == ["interrupted"] * 2
        late = asyncio.create_task(visit(admission))
        await settled()
        assert not late.done()
        admission.resume()
        assert await late == "served"

    asyncio.run(scene())


def test_a_pause_that_interrupts_leaves_an_idle_engine_alone() -> None:
    async def interrupt() -> None:
        raise AssertionError("nothing is in flight")

    asyncio.run(asyncio.wait_for(open_admission().pause(interrupt), 60))


def test_it_opens_only_when_neither_paused_nor_held() -> None:
    async def scene() -> None:
        admission = open_admission()
        await admission.pause()
        await admission.hold()
        late = asyncio.create_task(visit(admission))
        scorer = asyncio.create_task(visit(admission, while_paused=True))
        admission.resume()
        await settled()
        assert not late.done()
        assert not scorer.done()
        admission.release()
        assert [await late, await scorer] == ["served", "served"]

    asyncio.run(scene())


def test_refusals_reach_those_who_waited_too() -> None:
    async def scene() -> None:
        admission = open_admission()
        await admission.pause()
        late = asyncio.create_task(visit(admission))
        await settled()
        admission.refuse("broken weights")
        admission.resume()
        with pytest.raises(GeneratorError, match="broken weights"):
            await late
        admission.refuse("")
        assert await visit(admission) == "served"

    asyncio.run(scene())


def test_a_closed_gate_stays_closed_and_keeps_nobody_waiting() -> None:
    async def scene() -> None:
        admission = open_admission()
        await admission.pause()
        late = asyncio.create_task(visit(admission))
        await settled()
        admission.close("closed")
        admission.refuse("")
        for visitor in (late, visit(admission)):
            with pytest.raises(GeneratorError, match="closed"):
                await visitor

    asyncio.run(scene())


def test_a_cancelled_visitor_leaves() -> None:
    async def scene() -> None:
        admission = open_admission()
        inside = asyncio.create_task(visit(admission, 60))
        await settled()
        inside.cancel()
        await asyncio.wait_for(admission.pause(), 1)
        late = asyncio.create_task(visit(admission))
        await settled()
        late.cancel()
        await settled()
        assert (admission.num_inside, admission.num_waiting) == (0, 0)

    asyncio.run(scene())
