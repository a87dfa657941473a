"""Waiting for answers of several workers, with the failures of Ray translated, and stacks of those that hang."""

from __future__ import annotations

import faulthandler
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray._private.state import actors as actor_states
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.errors import (
    FailureOrigin,
    PeerFailed,
    RLError,
    WorkerDied,
    WorkerEnvironmentError,
    WorkerError,
    WorkerStalled,
)

_log = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR2
"""Asks a process for the stacks of its threads; the handler needs neither the event loop nor the interpreter's lock."""

_MARGIN_S = 1.0

DECISION_S = 120.0
"""How long Ray may take to decide whether a worker that cannot be reached is dead. With its default health checks it
takes 15 s for a node that is gone and 65 s for one that is frozen."""

_DECISION_POLL_S = 0.5

LINGER_S = 0.01
"""How long calls that are over wait for others to be, so that many are read at once: each look costs this process as
much as reading an answer."""

_DEATHS: dict[type[RayError], str] = {
    ray_errors.ActorUnavailableError: "the process could not be reached",
    ray_errors.RayActorError: "the process ended",
    ray_errors.WorkerCrashedError: "the process ended",
    ray_errors.OutOfMemoryError: "the process was killed because its node ran out of memory",
    ray_errors.NodeDiedError: "its node died",
    ray_errors.LocalRayletDiedError: "Ray ended on its node",
    ray_errors.ActorUnschedulableError: "it cannot be placed on any living node",
    ray_errors.TaskUnschedulableError: "it cannot be placed on any living node",
    ray_errors.ActorPlacementGroupRemoved: "its devices were given back",
    ray_errors.TaskPlacementGroupRemoved: "its devices were given back",
    ray_errors.ObjectLostError: "its input or its answer was lost with a process or a node",
    ray_errors.ActorHandleNotFoundError: "the process ended",
}
"""Failures that lose the worker, or its objects; the first class that fits counts."""


def gather(
    refs: Sequence[ray.ObjectRef], origins: Sequence[FailureOrigin], timeout_s: float | None = None
) -> list[Any]:
    """Return answers in order, or raise the first failure as soon as it happens (the other ranks of a collective would
    only time out).

    Args:
        refs: One call per worker.
        origins: The worker and the work of each call, in the same order.
        timeout_s: Bound of the whole wait.

    Raises:
        RLError: The worker's own; `WorkerError` if it was foreign; `WorkerDied` if the process ended; `WorkerStalled`
            if it did not answer in time.
    """

    def fail(failure: RLError) -> None:
        raise failure

    return settle(refs, origins, timeout_s, grace_s=0.0, on_failure=fail)[0]


def wait(refs: Sequence[ray.ObjectRef], timeout_s: float | None = None) -> list[ray.ObjectRef]:
    """Wait for at least one call to end; returns those that have ended up to `LINGER_S` later, in order, or none after
    the time-out.
    """
    done, waiting = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    more = ray.wait(waiting, num_returns=len(waiting), timeout=LINGER_S)[0] if done and waiting else []
    over = {*done, *more}
    return [ref for ref in refs if ref in over]


def outcomes(refs: Sequence[ray.ObjectRef], origins: Sequence[FailureOrigin]) -> Iterator[Any]:
    """Yield the results of calls that are over, in order: the answer, or the `RLError` that `fetch` raises."""
    try:
        yield from ray.get(list(refs))
        return
    except RayError:
        # They are fetched one by one, so that each failure is known by its worker.
        pass
    for ref, origin in zip(refs, origins, strict=True):
        try:
            yield fetch(ref, origin)
        except RLError as error:
            yield error


def settle(
    refs: Sequence[ray.ObjectRef],
    origins: Sequence[FailureOrigin],
    timeout_s: float | None,
    *,
    grace_s: float,
    on_failure: Callable[[RLError], None],
) -> tuple[list[Any], list[RLError]]:
    """Wait for workers that work with one another; return answers in order, and failures in the order of time.

    Args:
        refs: One call per worker.
        origins: The worker and the work of each call, in the same order.
        timeout_s: Bound of the whole wait; None for no bound.
        grace_s: Seconds that the others may take to end after the first failure, so that each side reports its own.
        on_failure: Called with the first failure, before the others are waited for.

    Returns:
        All answers and no failure, or no answers and all failures.
    """
    origin_of = dict(zip(refs, origins, strict=True))
    answers: dict[ray.ObjectRef, Any] = {}
    failures: list[RLError] = []
    end = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = list(refs)
    while waiting:
        ready = wait(waiting, None if end is None else max(0.0, end - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            late = stalled(timeout_s or 0.0, origin_of[waiting[0]], num_others=len(waiting) - 1)
            failures.append(late)
            on_failure(late)
            end = time.monotonic() + grace_s
        for ref, outcome in zip(ready, outcomes(ready, [origin_of[ref] for ref in ready]), strict=True):
            if not isinstance(outcome, RLError):
                answers[ref] = outcome
                continue
            failures.append(outcome)
            if len(failures) == 1:
                on_failure(outcome)
                end = time.monotonic() + grace_s
        waiting = [ref for ref in waiting if ref not in ready]
    return ([], failures) if failures else ([answers[ref] for ref in refs], [])


def fetch(ref: ray.ObjectRef, origin: FailureOrigin, timeout_s: float | None = None) -> Any:
    """Return one answer, with its failure translated as in `gather`. The call waits for a worker that cannot be
    reached until Ray decides whether it is dead.
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


def translate(error: RayError, origin: FailureOrigin) -> RLError:
    """Return the failure of a Ray call in this project's terms; does not wait."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, WorkerError):
            return cause.at(origin)
        if type(cause) is RLError:
            return RLError(f"{origin}: {cause}")
        if isinstance(cause, PeerFailed):
            # The message is the same on every rank that repeats it.
            return PeerFailed(f"{origin.role} {cause}")
        if isinstance(cause, RLError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, origin)
        return WorkerError(type(cause).__qualname__, str(cause), str(error), origin)
    if isinstance(error, GetTimeoutError):
        return WorkerStalled("no answer in time", origin)
    if isinstance(error, ray_errors.RuntimeEnvSetupError):
        return WorkerEnvironmentError(f"{origin}: the process's environment could not be set up: {_reason(error)}")
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return WorkerError(type(error).__qualname__, _reason(error), str(error), origin)
    for kind, said in _DEATHS.items():
        if isinstance(error, kind):
            return WorkerDied(f"{said}: {_reason(error)}", origin)
    return WorkerError(type(error).__qualname__, str(error), "", origin)


def stalled(timeout_s: float, origin: FailureOrigin, *, num_others: int = 0) -> WorkerStalled:
    """Return the error for a worker that did not answer in time."""
    others = f", nor from {num_others} more" if num_others else ""
    return WorkerStalled(f"no answer within {timeout_s:g} s{others}", origin)


def await_decision(actor_id: str | None) -> str:
    """Wait until Ray has declared an unreachable actor dead, and return its reason; empty if it has not in time.

    Workers that are restarted before that would be placed on the lost node.
    """
    end = time.monotonic() + DECISION_S
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
    # After the cause Ray lists other possible causes.
    return (telling or lines or ["unknown"])[-1].partition(" Some common causes include")[0]


def write_stacks_on_signal(path: str) -> None:
    """Make this process append the stacks of all its threads to a file whenever it gets `SIGNAL`."""
    # The handler writes to the file's descriptor, so it stays open as long as the process.
    file = open(path, "a")  # noqa: SIM115
    faulthandler.register(SIGNAL, file=file, all_threads=True)


def request_stacks(workers: Sequence[ActorHandle], logs: Sequence[str], timeout_s: float = 30.0) -> str:
    """Ask the processes of these actors to write their stacks to their logs; return what was asked, for a message.

    A task on each actor's node sends the signal, so that a process which hangs in native code is reached as well. One
    that is stopped writes nothing before it continues.
    """
    states = [actor_states(worker._actor_id.hex()) for worker in workers]
    pids_by_node: dict[str, list[int]] = {}
    for state in states:
        if state and state["State"] == "ALIVE":
            pids_by_node.setdefault(state["Address"]["NodeID"], []).append(state["Pid"])
    number, pause_s = int(SIGNAL), _MARGIN_S

    # This function is nested, so that it travels by value: the node's own interpreter need not have this package.
    def send(pids: Sequence[int]) -> list[str]:
        import os
        import time

        states = []
        for pid in pids:
            try:
                os.kill(pid, number)
                with open(f"/proc/{pid}/stat") as file:
                    states.append(file.read().rpartition(")")[2].split()[0])
            except (ProcessLookupError, FileNotFoundError):
                continue
        time.sleep(pause_s)  # The caller may end the processes next.
        return states

    task = ray.remote(num_cpus=0, max_retries=0)(send)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pids)
        for node, pids in pids_by_node.items()
    ]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    found: list[str] = []
    for ref in done:
        try:
            found += ray.get(ref)
        except ray.exceptions.RayError as error:
            _log.warning("no stacks from one node: %s", str(error).splitlines()[0])
    where = f" ({logs[0]}{', ...' if len(logs) > 1 else ''})" if logs else ""
    stopped = found.count("T")
    text = f"asked {len(found)} of {len(workers)} processes to write the stacks of their threads to their logs{where}"
    return f"{text}; {stopped} of them stopped (state T), which write none" if stopped else text
