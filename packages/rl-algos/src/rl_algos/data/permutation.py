"""Orders that are equal on every machine and with every version of numpy."""

from __future__ import annotations

import numpy as np


def permutation(size: int, *entropy: int) -> np.ndarray:
    """int64 `[size]`, a permutation that depends only on the entropy.

    Raw bits of PCG64, which numpy keeps stable (NEP 19); `Generator.permutation` may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(bits, kind="stable")
