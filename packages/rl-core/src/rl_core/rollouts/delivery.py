"""One weight version at a replica: taken over while it is paused, and tried before it serves again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.errors import WeightSyncError
from rl_core.rollouts.generation import Generator
from rl_core.weights import Manifest, Transport, WeightSource

QUANTISATION_NOISE = "quantisation_noise"
"""Entry of `Generator.health`: the estimate of `quantisation_noise`, for an engine that quantises its weights."""

MATRICES_OF_A_BLOCK = 2
"""Products in a row within a block: into it and out of it, in attention as in a feed-forward layer."""


def quantisation_noise(relative_error: float, num_matrices: int) -> float:
    """Estimate the error of logits relative to their size, to first order.

    The error `e` of a weight, relative to its norm, is also the error of its products; activations in the same format
    add as much, so a block of two products adds `4 e^2` to the square of the error of its output, and passes on the
    error of its input. The residual stream is a sum of blocks. If they are about equally large and their errors
    independent, block number `l` adds `4 e^2 / l` to the square of the stream's relative error, whose sum over `n`
    blocks is `4 e^2 H(n)` with the harmonic number `H`: it grows with the logarithm of the depth only.

    Args:
        relative_error: Root mean square over the quantised matrices of their errors, each relative to its norm.
        num_matrices: Number of quantised matrices.

    Returns:
        The standard deviation of the error, relative to the logits' own.
    """
    num_blocks = max(1, round(num_matrices / MATRICES_OF_A_BLOCK))
    harmonic = sum(1 / place for place in range(1, num_blocks + 1))
    return relative_error * math.sqrt(2 * MATRICES_OF_A_BLOCK * harmonic)


def noise_of(health: Mapping[str, Any]) -> float:
    """Return the noise that an engine reports; 0 if it does not quantise."""
    return float(health.get(QUANTISATION_NOISE, 0.0))


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
        quantisation_noise: As `rl_core.rollouts.delivery.quantisation_noise`; 0 if the replica does not quantise.
    """

    digests: Sequence[str]
    scores: Sequence[np.ndarray]
    quantisation_noise: float = 0.0


async def publish_weights(source: WeightSource, generator: Generator, version: int, transport: Transport) -> None:
    """Bring a generator to the weights of a model, verified, for a loop that has both: it serves them from then on.

    Args:
        source: Rank of the model, the only one.
        generator: Generator that has started, whose engine may consist of several ranks.
        version: Version of the weights, higher than the last one.
        transport: Transfer settings, the same each time. With the kind `disk`, `address` is a folder.

    Raises:
        WeightSyncError: Naming the tensors that did not arrive; the generator then serves nothing until a transfer
            succeeds.
        ValueError: If the model has other ranks, which have to send as well.
    """
    manifest = source.manifest(version)
    if manifest is None:
        raise ValueError("this rank does not speak for its model; weights are published from rank 0 of a single rank")
    await generator.pause()
    try:
        await generator.begin(manifest)
        sending = asyncio.create_task(asyncio.to_thread(source.send, manifest, transport))
        try:
            if not transport.ends_meet:
                await sending
            received = await generator.receive(transport, 1)
        except BaseException:
            source.interrupt(transport, "the generator did not receive")
            await asyncio.wait([sending])
            raise
        if set(received) != set(await sending):
            raise WeightSyncError(f"weights {version} arrived with other contents than were sent")
        await generator.commit(version)
    finally:
        await generator.resume()


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
