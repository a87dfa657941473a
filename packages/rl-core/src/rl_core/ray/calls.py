"""Waiting for answers of several workers, and what their failures mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rl_core.errors import Origin, RLError, WorkerDied, WorkerError


def gather(refs: Sequence[ray.ObjectRef], origins: Sequence[Origin], timeout_s: float | None = None) -> list[Any]:
    """Answers in order, or the first failure as soon as it happens (the other ranks of a collective would only time
    out).

    Args:
        refs: one call per worker.
        origins: who was asked what, in the same order.
        timeout_s: bound of the whole wait.

    Raises:
        RLError: the worker's own; `WorkerError` where it was foreign; `WorkerDied` where the process ended or did not
            answer in time.
    """
    origin_of = dict(zip(refs, origins, strict=True))
    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not done:
            late = origin_of[waiting[0]]
            raise WorkerDied(f"no answer within {timeout_s:.0f} s", late)
        for ref in done:
            fetch(ref, origin_of[ref])
    return [ray.get(ref) for ref in refs]


def fetch(ref: ray.ObjectRef, origin: Origin, timeout_s: float | None = None) -> Any:
    """One answer, its failure translated as in `gather`."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise WorkerDied(f"no answer within {timeout_s:.0f} s", origin) from None
    except (RayTaskError, RayActorError) as error:
        raise translate(error, origin) from None


def translate(error: RayTaskError | RayActorError, origin: Origin) -> RLError:
    """The failure of a Ray call in this project's terms."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, WorkerError):
            return cause.at(origin)
        if isinstance(cause, RLError):
            return cause
        return WorkerError(type(cause).__qualname__, str(cause), str(error), origin)
    return WorkerDied(f"the process ended: {_reason(error)}", origin)


def _reason(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "cause" in line.lower() or "exit" in line.lower() or "killed" in line.lower()]
    return (telling or lines or ["unknown"])[-1]
