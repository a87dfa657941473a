"""One weight version at a replica: taken over while it is paused, and tried before it serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.rollouts.generation import Generator
from rl_core.rollouts.quantisation import noise_of
from rl_core.weights import Manifest, Transport


@dataclass(frozen=True)
class Delivery:
    """How a weight version reaches a replica.

    Args:
        transport: Over which it travels.
        first_rank: First rank of the replica's receivers; the others follow.
        canary: Int32 token rows to score with the new weights.
        takes_turns: True if the replica sleeps while the policy has the devices: then only its weights are awake during
            the transfer, and `score_canary` scores the canary once there is room for a KV cache.
        in_flight: True if requests in flight are interrupted, to be continued with the new weights, instead of finished
            with the old ones.
    """

    transport: Transport
    first_rank: int
    canary: tuple[np.ndarray, ...]
    takes_turns: bool = False
    in_flight: bool = False


@dataclass(frozen=True)
class Taken:
    """The weights that a replica has taken over.

    Args:
        digests: Digests of all weights as received, per engine rank.
        scores: Float32 `[tokens]` per row of the canary; none yet if the replica takes turns.
        quantisation_noise: As `rl_core.rollouts.quantisation.quantisation_noise`; 0 if the replica does not quantise.
    """

    digests: Sequence[str]
    scores: Sequence[np.ndarray]
    quantisation_noise: float = 0.0


async def take_over(generator: Generator, manifest: Manifest, delivery: Delivery) -> Taken:
    """Pause a replica and bring it to a weight version; it stays paused.

    Raises:
        WeightSyncError: Naming the tensors that did not arrive, or are not used.
        GeneratorError: If the engine died.
    """
    await generator.pause("interrupt" if delivery.in_flight else "finish")
    if delivery.takes_turns:
        await generator.wake(("weights",))
    await generator.begin(manifest)
    digests = await generator.receive(delivery.transport, delivery.first_rank)
    await generator.commit(manifest.version)
    noise = noise_of(await generator.health())
    return Taken(digests, [] if delivery.takes_turns else await _scores(generator, delivery.canary), noise)


async def score_canary(generator: Generator, canary: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Wake the KV cache of a replica that has taken a version over, and score the canary."""
    await generator.wake(("kv_cache",))
    return await _scores(generator, canary)


async def _scores(generator: Generator, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(await asyncio.gather(*[generator.score(row) for row in rows]))
