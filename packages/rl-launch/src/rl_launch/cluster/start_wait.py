"""Waiting for workers to start; the log lists missing workers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from rl_core.errors import FailureOrigin, WorkerStalled
from rl_core.ray.calls import gather

_log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds between two lines about the missing workers."""


class Bound(NamedTuple):
    """The bound of a wait.

    Attributes:
        timeout_s: Timeout in seconds.
        key: The key that sets it.
    """

    timeout_s: float
    key: str


def gather_start(
    refs: Sequence[ray.ObjectRef], origins: Sequence[FailureOrigin], bound: Bound, awaited: str
) -> list[Any]:
    """Return answers in order, or raise the first failure; logs from time to time which workers have not answered.

    Args:
        refs: One call per worker.
        origins: The workers, in the same order.
        bound: Bound of the whole wait.
        awaited: Name of the start, for the log.

    Raises:
        RLError: See `rl_core.ray.calls.gather`; after the bound, with its key.
    """
    begun = time.monotonic()
    while True:
        left = begun + bound.timeout_s - time.monotonic()
        try:
            return gather(refs, origins, max(0.0, min(left, REPORT_S)))
        except WorkerStalled:
            _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            missing = [origin for ref, origin in zip(refs, origins, strict=True) if ref in set(waiting)]
            if not missing:
                raise
            others = len(missing) - 1
            if left <= REPORT_S:
                more = f"; {others} more did not finish either" if others else ""
                problem = f"{awaited} did not finish within {bound.timeout_s:g} s ({bound.key}){more}"
                raise WorkerStalled(problem, missing[0]) from None
            first = f"{missing[0].role} rank {missing[0].rank} on {missing[0].node}"
            workers = f"{first} and {others} more" if others else first
            waited = time.monotonic() - begun
            _log.info("still waiting for %s after %.0f s: %s%s", awaited, waited, workers, busy())


def busy() -> str:
    """Return a remark if this machine has a load far above its CPUs; empty otherwise."""
    load, num_cpus = os.getloadavg()[0], os.cpu_count() or 1
    return f" (this machine is busy: a load of {load:.0f} on {num_cpus} CPUs)" if load > 2 * num_cpus else ""
