from __future__ import annotations

import asyncio

import pytest

from rl_core.errors import GeneratorError
from rl_vllm.gate import Gate


def open_gate() -> Gate:
    gate = Gate("not yet")
    gate.serve()
    return gate


async def visit(gate: Gate, seconds: float = 0.0, *, while_paused: bool = False) -> str:
    async with gate.passage(while_paused=while_paused):
        await asyncio.sleep(seconds)
    return "served"


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_pause_lets_those_inside_finish_and_later_ones_wait() -> None:
    async def scene() -> None:
        gate = open_gate()
        inside = asyncio.create_task(visit(gate, 0.02))
        await settled()
        await gate.pause()
        assert inside.done()
        late = asyncio.create_task(visit(gate))
        await settled()
        assert (late.done(), gate.num_waiting) == (False, 1)
        assert await visit(gate, while_paused=True) == "served"
        gate.resume()
        assert await late == "served"
        assert (gate.num_inside, gate.num_waiting) == (0, 0)

    asyncio.run(scene())


def test_it_opens_only_when_neither_paused_nor_held() -> None:
    async def scene() -> None:
        gate = open_gate()
        await gate.pause()
        await gate.hold()
        late = asyncio.create_task(visit(gate))
        scorer = asyncio.create_task(visit(gate, while_paused=True))
        gate.resume()
        await settled()
        assert not late.done()
        assert not scorer.done()
        gate.release()
        assert [await late, await scorer] == ["served", "served"]

    asyncio.run(scene())


def test_refusals_reach_those_who_waited_too() -> None:
    async def scene() -> None:
        gate = open_gate()
        await gate.pause()
        late = asyncio.create_task(visit(gate))
        await settled()
        gate.refuse("broken weights")
        gate.resume()
        with pytest.raises(GeneratorError, match="broken weights"):
            await late
        gate.serve()
        assert await visit(gate) == "served"

    asyncio.run(scene())


def test_a_closed_gate_stays_closed_and_keeps_nobody_waiting() -> None:
    async def scene() -> None:
        gate = open_gate()
        await gate.pause()
        late = asyncio.create_task(visit(gate))
        await settled()
        gate.close("closed")
        gate.serve()
        for visitor in (late, visit(gate)):
            with pytest.raises(GeneratorError, match="closed"):
                await visitor

    asyncio.run(scene())


def test_a_cancelled_visitor_leaves() -> None:
    async def scene() -> None:
        gate = open_gate()
        inside = asyncio.create_task(visit(gate, 60))
        await settled()
        inside.cancel()
        await asyncio.wait_for(gate.pause(), 1)
        late = asyncio.create_task(visit(gate))
        await settled()
        late.cancel()
        await settled()
        assert (gate.num_inside, gate.num_waiting) == (0, 0)

    asyncio.run(scene())
