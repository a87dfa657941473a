from __future__ import annotations

import asyncio

import pytest

from rl_core.errors import GeneratorError, WeightSyncError
from rl_core.rollouts.lifecycle import SERVING, Lifecycle, State
from rl_core.weights import Manifest, TensorSpec

WEIGHT = TensorSpec("layer.weight", (2, 2), "float32")
FACTOR = TensorSpec("layer.lora_A.weight", (1, 2), "float32")
MERGED = Manifest(1, (WEIGHT,))
ADAPTER = Manifest(2, (FACTOR,), num_factors=1)


async def visit(lifecycle: Lifecycle, *, while_paused: bool = False) -> str:
    async with lifecycle.request(while_paused=while_paused):
        return "served"


def serving() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.load(awaits_weights=False)
    return lifecycle


def take_over(lifecycle: Lifecycle, manifest: Manifest) -> None:
    lifecycle.begin(manifest)
    lifecycle.receive(manifest)
    lifecycle.commit(manifest.version)


def test_a_weight_version_is_served_once_it_is_committed() -> None:
    lifecycle = Lifecycle()
    lifecycle.load(awaits_weights=True)
    assert lifecycle.state == State("no weights have been sent to it yet")
    lifecycle.begin(MERGED)
    refusal = "weight version 1 has not been loaded completely"
    assert lifecycle.state == State(refusal)
    lifecycle.receive(MERGED)
    assert lifecycle.state == State("weight version 1 has not been loaded completely", manifest=MERGED)
    with pytest.raises(GeneratorError, match=refusal):
        asyncio.run(visit(lifecycle))
    lifecycle.commit(1)
    assert (lifecycle.state, lifecycle.version, lifecycle.admission.refusal) == (SERVING, 1, "")
    assert asyncio.run(visit(lifecycle)) == "served"


def test_a_version_that_was_not_received_is_not_committed() -> None:
    lifecycle = serving()
    lifecycle.begin(MERGED)
    with pytest.raises(WeightSyncError, match="cannot commit weight version 1: the one announced is none"):
        lifecycle.commit(1)
    lifecycle.receive(MERGED)
    with pytest.raises(WeightSyncError, match="cannot commit weight version 3: the one announced is 1"):
        lifecycle.commit(3)
    assert lifecycle.state == State("weight version 1 has not been loaded completely", manifest=MERGED)


def test_adapters_need_weights_that_they_sit_on() -> None:
    lifecycle = serving()
    take_over(lifecycle, ADAPTER)
    assert (lifecycle.state, lifecycle.version) == (SERVING, 2)
    lifecycle.drop_weights()
    with pytest.raises(WeightSyncError, match=r"weight version \d+ contains adapters only"):
        lifecycle.begin(ADAPTER)
    take_over(lifecycle, MERGED)
    take_over(lifecycle, ADAPTER)


def test_a_transfer_that_broke_off_leaves_no_weights_for_adapters() -> None:
    lifecycle = serving()
    lifecycle.begin(MERGED)
    with pytest.raises(WeightSyncError, match=r"weight version \d+ contains adapters only"):
        lifecycle.begin(ADAPTER)


def test_an_adapter_transfer_that_broke_off_can_be_repeated() -> None:
    lifecycle = serving()
    lifecycle.begin(ADAPTER)
    take_over(lifecycle, ADAPTER)
    assert lifecycle.state == SERVING


def test_no_transfer_begins_while_requests_are_in_flight() -> None:
    async def scene() -> None:
        lifecycle = serving()
        async with lifecycle.request():
            with pytest.raises(GeneratorError, match="1 requests are in flight"):
                lifecycle.begin(MERGED)
        assert lifecycle.state == SERVING

    asyncio.run(scene())


def test_requests_wait_until_both_parts_are_awake_and_scores_only_in_sleep() -> None:
    async def scene() -> None:
        lifecycle = serving()
        await lifecycle.admission.pause()
        assert await visit(lifecycle, while_paused=True) == "served"
        await lifecycle.admission.hold()
        lifecycle.sleep()
        asleep = [asyncio.ensure_future(visit(lifecycle, while_paused=paused)) for paused in (True, False)]
        lifecycle.wake(["weights"])
        await asyncio.sleep(0)
        assert lifecycle.admission.num_waiting == 2
        lifecycle.admission.resume()
        await asyncio.sleep(0)
        assert lifecycle.admission.num_waiting == 2
        lifecycle.wake(["kv_cache"])
        assert await asyncio.gather(*asleep) == ["served", "served"]

    asyncio.run(scene())


def test_a_closed_replica_stays_closed() -> None:
    lifecycle = serving()
    lifecycle.close()
    take_over(lifecycle, MERGED)
    assert lifecycle.admission.refusal == "the generator is closed"
