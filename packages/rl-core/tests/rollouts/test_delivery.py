"""A replica is brought to a version in one order, and nothing is served meanwhile."""

import asyncio

import numpy as np
import pytest

from rl_core.errors import WeightSyncError
from rl_core.rollouts.delivery import Delivery, publish_weights, score_canary, take_over
from rl_core.weights import Manifest, Transport

MANIFEST = Manifest(3, ())
CANARY = (np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32))


class Generator:
    def __init__(self, refuses=""):
        self.events, self.refuses, self.modes = [], refuses, []

    async def pause(self, mode="finish"):
        self.events.append("pause")
        self.modes.append(mode)

    async def health(self):
        return {"weight_version": 3, "quantisation_noise": 0.125}

    def __getattr__(self, method):
        async def answer(*args):
            self.events.append(method)
            if method == self.refuses:
                raise WeightSyncError(f"refused at {method}")
            return {"receive": ["digest"], "score": -np.ones(len(args[0]) if method == "score" else 0)}.get(method)

        return answer


def delivery(*, takes_turns=False, in_flight=False):
    return Delivery(Transport("ipc", "here:1", 1), 1, CANARY, takes_turns, in_flight)


def test_a_replica_with_its_own_devices_scores_the_canary_before_it_resumes():
    generator = Generator()
    taken = asyncio.run(take_over(generator, MANIFEST, delivery()))
    assert generator.events == ["pause", "begin", "receive", "commit", "score", "score"]
    assert taken.digests == ["digest"]
    assert [len(scores) for scores in taken.scores] == [3, 2]
    assert taken.quantisation_noise == 0.125


def test_a_replica_that_takes_turns_scores_once_it_has_room_for_a_cache():
    generator = Generator()
    taken = asyncio.run(take_over(generator, MANIFEST, delivery(takes_turns=True)))
    assert generator.events == ["pause", "wake", "begin", "receive", "commit"]
    assert taken.scores == []
    assert len(asyncio.run(score_canary(generator, CANARY))) == 2
    assert generator.events[5:] == ["wake", "score", "score"]


@pytest.mark.parametrize(("in_flight", "mode"), [(False, "finish"), (True, "interrupt")])
def test_requests_in_flight_are_interrupted_if_that_is_asked_for(in_flight, mode):
    generator = Generator()
    asyncio.run(take_over(generator, MANIFEST, delivery(in_flight=in_flight)))
    assert generator.modes == [mode]


@pytest.mark.parametrize("method", ["begin", "receive", "commit"])
def test_a_phase_that_fails_is_the_last(method):
    generator = Generator(refuses=method)
    with pytest.raises(WeightSyncError, match=method):
        asyncio.run(take_over(generator, MANIFEST, delivery()))
    assert generator.events[-1] == method


class Source:
    def __init__(self, digest="digest", manifest=MANIFEST):
        self.digest, self.sent, self.interrupted, self._manifest = digest, [], [], manifest

    def manifest(self, version):
        return self._manifest

    def send(self, manifest, transport):
        self.sent.append(transport)
        return [self.digest]

    def interrupt(self, transport, reason):
        self.interrupted.append(reason)


@pytest.mark.parametrize("kind", ["disk", "ipc"])
def test_weights_are_published_in_one_call(kind):
    generator, source, transport = Generator(), Source(), Transport(kind, "here:1", 1)
    asyncio.run(publish_weights(source, generator, 3, transport))
    assert generator.events == ["pause", "begin", "receive", "commit", "resume"]
    assert source.sent == [transport]


def test_weights_that_did_not_arrive_are_not_served():
    generator = Generator()
    with pytest.raises(WeightSyncError, match="weights 3 arrived with other contents than were sent"):
        asyncio.run(publish_weights(Source("another"), generator, 3, Transport("disk", "here", 1)))
    assert generator.events == ["pause", "begin", "receive", "resume"]
    generator, source = Generator("receive"), Source()
    with pytest.raises(WeightSyncError, match="refused at receive"):
        asyncio.run(publish_weights(source, generator, 3, Transport("disk", "here", 1)))
    assert source.interrupted
    assert generator.events[-1] == "resume"
    with pytest.raises(ValueError, match="rank 0 of a single rank"):
        asyncio.run(publish_weights(Source(manifest=None), generator, 3, Transport("disk", "here", 1)))
