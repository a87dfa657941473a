"""Waiting for workers to start; the log names those that are missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rl_core.errors import Origin, WorkerStalled
from rl_core.ray.calls import gather

_log = logging.getLogger(__name__)

REPORT_S = 60.0
"""Seconds between two lines that name the missing workers."""


@dataclass(frozen=True)
class Bound:
    """The bound of a wait.

    Args:
        timeout_s: longest wait.
        key: the key that sets it.
    """

    timeout_s: float
    key: str


def gather_start(refs: Sequence[ray.ObjectRef], origins: Sequence[Origin], bound: Bound, awaited: str) -> list[Any]:
    """Return answers in order, or raise the first failure; logs from time to time which workers have not answered.

    Args:
        refs: one call per worker.
        origins: the workers, in the same order.
        bound: of the whole wait.
        awaited: name of the start, for the log.

    Raises:
        RLError: as `rl_core.ray.calls.gather`; after the bound, with its key.
    """
    begun = time.monotonic()
    while True:
        left = begun + bound.timeout_s - time.monotonic()
        try:
            return gather(refs, origins, max(0.0, min(left, REPORT_S)))
        except WorkerStalled:
            missing = _missing(refs, origins)
            if not missing:
                raise
            others = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
            if left <= REPORT_S:
                raise WorkerStalled(
                    f"{awaited} is not done within {bound.timeout_s:g} s ({bound.key}){others}", missing[0]
                ) from None
            waited = time.monotonic() - begun
            _log.info("still waiting for %s after %.0f s: %s is not done%s", awaited, waited, missing[0], others)


def _missing(refs: Sequence[ray.ObjectRef], origins: Sequence[Origin]) -> list[Origin]:
    _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return [origin for ref, origin in zip(refs, origins, strict=True) if ref in set(waiting)]
