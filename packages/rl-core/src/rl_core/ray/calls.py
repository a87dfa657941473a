"""Waiting for answers of several workers; every failure that Ray reports is translated here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import exceptions as failures
from ray._private.state import actors as actor_states
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from rl_core.errors import Origin, RLError, WorkerDied, WorkerEnvironmentError, WorkerError, WorkerStalled

DECISION_S = 120.0
"""How long Ray may take to decide whether a worker that cannot be reached is dead. With its default health checks it
takes 15 s for a node that is gone and 65 s for one that is frozen."""

_DECISION_POLL_S = 0.5

_DEATHS: dict[type[RayError], str] = {
    failures.ActorUnavailableError: "the process could not be reached",
    failures.RayActorError: "the process ended",
    failures.WorkerCrashedError: "the process ended",
    failures.OutOfMemoryError: "the process was ended, as its node ran out of memory",
    failures.NodeDiedError: "its node died",
    failures.LocalRayletDiedError: "Ray ended on its node",
    failures.ActorUnschedulableError: "it cannot be placed on any living node",
    failures.TaskUnschedulableError: "it cannot be placed on any living node",
    failures.ActorPlacementGroupRemoved: "its devices were given back",
    failures.TaskPlacementGroupRemoved: "its devices were given back",
    failures.ObjectLostError: "its input or its answer was lost with a process or a node",
    failures.ActorHandleNotFoundError: "the process ended",
}
"""Failures after which the worker, or what it held, is gone; the first class that fits counts."""


def gather(refs: Sequence[ray.ObjectRef], origins: Sequence[Origin], timeout_s: float | None = None) -> list[Any]:
    """Answers in order, or the first failure as soon as it happens (the other ranks of a collective would only time
    out).

    Args:
        refs: one call per worker.
        origins: who was asked what, in the same order.
        timeout_s: bound of the whole wait.

    Raises:
        RLError: the worker's own; `WorkerError` if it was foreign; `WorkerDied` if the process ended; `WorkerStalled`
            if it did not answer in time.
    """
    origin_of = dict(zip(refs, origins, strict=True))
    end = None if timeout_s is None else time.monotonic() + timeout_s
    answers: dict[ray.ObjectRef, Any] = {}
    waiting = list(refs)
    while waiting:
        left = None if end is None else max(0.0, end - time.monotonic())
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        if not done:
            raise stalled(timeout_s or 0.0, origin_of[waiting[0]], num_others=len(waiting) - 1)
        # whatever else is ready: one by one, a thousand ranks would be waited for a million times
        more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
        for ref in (*done, *more):
            answers[ref] = fetch(ref, origin_of[ref])
    return [answers[ref] for ref in refs]


def fetch(ref: ray.ObjectRef, origin: Origin, timeout_s: float | None = None) -> Any:
    """One answer, its failure translated as in `gather`; a worker that cannot be reached is waited for until Ray
    decides whether it is dead.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise stalled(timeout_s or 0.0, origin) from None
    except ActorUnavailableError as error:
        reason = await_decision(error.actor_id)
        raise WorkerDied(f"{_DEATHS[ActorUnavailableError]}: {reason or _reason(error)}", origin) from None
    except RayError as error:
        raise translate(error, origin) from None


def translate(error: RayError, origin: Origin) -> RLError:
    """The failure of a Ray call in this project's terms; does not wait."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, WorkerError):
            return cause.at(origin)
        if isinstance(cause, RLError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, origin)
        return WorkerError(type(cause).__qualname__, str(cause), str(error), origin)
    if isinstance(error, GetTimeoutError):
        return WorkerStalled("no answer in time", origin)
    if isinstance(error, failures.RuntimeEnvSetupError):
        return WorkerEnvironmentError(f"{origin}: the process's environment could not be set up: {_reason(error)}")
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return WorkerError(type(error).__qualname__, _reason(error), str(error), origin)
    for kind, said in _DEATHS.items():
        if isinstance(error, kind):
            return WorkerDied(f"{said}: {_reason(error)}", origin)
    return WorkerError(type(error).__qualname__, str(error), "", origin)


def stalled(timeout_s: float, origin: Origin, *, num_others: int = 0) -> WorkerStalled:
    """The error for a worker that did not answer in time."""
    others = f", nor from {num_others} more" if num_others else ""
    return WorkerStalled(f"no answer within {timeout_s:g} s{others}", origin)


def await_decision(actor_id: str | None, patience_s: float = DECISION_S) -> str:
    """Wait until Ray has declared an unreachable actor dead, and return its reason; empty if it has not in time.

    Whoever starts workers anew before that would place them on the lost node.
    """
    end = time.monotonic() + patience_s
    while actor_id is not None and time.monotonic() < end:
        found = actor_states(actor_id)
        if not found or found["State"] == "DEAD":
            context = found["DeathCause"].actor_died_error_context if found else None
            return (context.error_message if context else "") or "Ray has declared it dead"
        time.sleep(_DECISION_POLL_S)
    return ""


def _reason(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "cause" in line.lower() or "exit" in line.lower() or "killed" in line.lower()]
    return (telling or lines or ["unknown"])[-1]
