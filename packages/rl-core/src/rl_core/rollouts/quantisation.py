"""How far quantised weights move the logprobs of an engine, from the error that was measured on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUANTISATION_NOISE = "quantisation_noise"
"""Entry of `Generator.health`: the estimate of `quantisation_noise`, for an engine that quantises its weights."""

MATRICES_OF_A_BLOCK = 2
"""Products in a row within a block: into it and out of it, in attention as in a feed-forward layer."""


def quantisation_noise(relative_error: float, num_matrices: int) -> float:
    """Estimate the error of logits relative to their size, to first order.

    The error `e` of a weight, relative to its norm, is that of its products; activations in the same format add as
    much, so a block of two products adds `4 e^2` to the square of the error of its output, and passes on the error of
    its input. The residual stream is a sum of blocks. If they are about equally large and their errors independent,
    block number `l` adds `4 e^2 / l` to the square of the stream's relative error, whose sum over `n` blocks is
    `4 e^2 H(n)` with the harmonic number `H`: it grows with the logarithm of the depth only.

    Args:
        relative_error: Root mean square over the quantised matrices of their errors, each relative to its norm.
        num_matrices: Number of quantised matrices.

    Returns:
        The standard deviation of the error, relative to that of the logits.
    """
    num_blocks = max(1, round(num_matrices / MATRICES_OF_A_BLOCK))
    harmonic = sum(1 / place for place in range(1, num_blocks + 1))
    return relative_error * math.sqrt(2 * MATRICES_OF_A_BLOCK * harmonic)


def noise_of(health: Mapping[str, Any]) -> float:
    """The noise that an engine reports; 0 if it does not quantise."""
    return float(health.get(QUANTISATION_NOISE, 0.0))
