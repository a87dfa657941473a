"""Stacks of processes that may no longer answer, written to their logs."""

from __future__ import annotations

import faulthandler
import logging
import signal
from collections.abc import Sequence

import ray
from ray._private.state import actors as actor_states
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_log = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR2
"""Asks a process for the stacks of its threads; the handler needs neither the event loop nor the interpreter's lock."""

_MARGIN_S = 1.0


def write_stacks_on_signal(path: str) -> None:
    """Make this process append the stacks of all its threads to a file whenever it gets `SIGNAL`."""
    # the handler writes to the file's descriptor, so it stays open as long as the process
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
    asked = [_signal_on(node, pids) for node, pids in pids_by_node.items()]
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


def _signal_on(node: str, pids: Sequence[int]) -> ray.ObjectRef:
    number, pause_s = int(SIGNAL), _MARGIN_S

    # nested, so that it travels by value: the node's own interpreter need not have this package
    def send() -> list[str]:
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
        time.sleep(pause_s)  # whoever asked may end the processes next
        return states

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(send).options(scheduling_strategy=here).remote()
