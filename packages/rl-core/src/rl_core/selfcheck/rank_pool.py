"""Processes that tests share: starting one and importing torch takes longer than most tests do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

from rl_core.devices import device_named
from rl_core.devices.device import VISIBLE, listed
from rl_core.errors import FailureOrigin, WorkerDied, WorkerError
from rl_core.model import Rendezvous
from rl_core.plugins import resolve

MORE_THREADS = 16
"""Growth in threads since the last garbage collection that starts another one: these threads belong to process groups
that only reference cycles keep alive, and each polls all the time."""

GRACE_S = 10.0
"""How long the other ranks may take to answer after one has failed."""


_context = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Import modules once, in the process that ranks are forks of, rather than in every rank.

    Holds for all pools of this process; call it before the first of them starts. The modules must leave no thread and
    no CUDA context behind.
    """
    _context.set_forkserver_preload(["rl_core.selfcheck.quick_imports", *modules])


@dataclass
class Rank:
    """The first argument of a function that runs in the pool.

    Args:
        rendezvous: How it finds the others; the port is fresh for every run, and kept for it until the next.
        held: What earlier functions left in this process, by name.
    """

    rendezvous: Rendezvous
    held: dict[str, Any] = field(default_factory=dict)


class Closing(ABC):
    """A context that calls `close` at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankPool(Closing):
    """Up to `num_ranks` processes that run functions together.

    Processes start at the first run that needs them. After a time-out, or a failure that leaves other ranks waiting,
    they are ended and the next run starts fresh ones, without what was held; `generation` counts how often they ended.

    Args:
        num_ranks: Maximum number of processes.
        device: Name of the kind of device that they compute on. On `cuda` each sees one GPU, of those that this process
            sees.
    """

    def __init__(self, num_ranks: int = 2, *, device: str = "cpu") -> None:
        self.num_ranks = num_ranks
        self._device = device
        self.generation = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._port: socket.socket | None = None

    def run(
        self, function: Callable[..., Any] | str, args: Sequence[tuple[Any, ...]], *, timeout_s: float = 300.0
    ) -> list[Any]:
        """Call `function(rank, *args[i])` on rank i for all i; the results in rank order.

        Args:
            function: Importable, or `"package.module:function"`.
            args: One tuple per rank, so its length is the world size; values pickle.
            timeout_s: Timeout of the whole call in seconds, and of each collective in it.

        Raises:
            WorkerError: The first failure, with its rank and traceback.
            WorkerDied: If a process ended.
            TimeoutError: Naming the ranks that did not answer.
        """
        world = len(args)
        if world > self.num_ranks:
            raise ValueError(f"{world} ranks requested from a pool of {self.num_ranks}")
        if not self._ranks:
            self._start()
        self._release()
        # The port is kept from other processes: bound, reusing addresses as the listeners do, and never listening.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))
        port = self._port.getsockname()[1]
        for rank, rank_args in enumerate(args):
            rendezvous = Rendezvous(rank, world, rank, "127.0.0.1", port, self._device, timeout_s)
            self._ranks[rank][1].send((function, rendezvous, rank_args))
        try:
            return self._gather(world, timeout_s)
        except BaseException as error:
            if not isinstance(error, Exception):
                # A test was cut off: the ranks are at work, and the next run would take their answers for its own.
                self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        self.generation += bool(self._ranks)
        for process, connection in self._ranks:
            connection.close()
            process.terminate()
            process.join()
        self._ranks = []
        self._release()

    def _release(self) -> None:
        """Release the port of the last run."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def _start(self) -> None:
        for rank in range(self.num_ranks):
            ours, theirs = _context.Pipe()
            args = (theirs, self._variables(rank))
            process = _context.Process(target=_serve, args=args, name=f"rank{rank}", daemon=True)
            # Libraries of new processes compute in one thread, unless the variable is set.
            is_ours = "OMP_NUM_THREADS" not in os.environ
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            try:
                process.start()
            finally:
                if is_ours:
                    del os.environ["OMP_NUM_THREADS"]
            theirs.close()
            self._ranks.append((process, ours))

    def _variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank's process."""
        if device_named(self._device).kernels != "cuda":
            return {}
        visible = listed(os.environ.get(VISIBLE, "")) or [str(index) for index in range(self.num_ranks)]
        if rank >= len(visible):
            raise ValueError(f"{self.num_ranks} ranks need as many GPUs, but {VISIBLE} lists {len(visible)}")
        return {VISIBLE: visible[rank]}

    def _gather(self, world: int, timeout_s: float) -> list[Any]:
        pending = {self._ranks[rank][1]: rank for rank in range(world)}
        results: list[Any] = [None] * world
        failure: Exception | None = None
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                origin = FailureOrigin("pool", rank, "localhost", "run")
                error: Exception | None = None
                try:
                    results[rank], raised = connection.recv()
                    error = None if raised is None else raised.at(origin)
                except EOFError:
                    error = WorkerDied("the process ended without an answer", origin)
                if error is not None and failure is None:
                    failure = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if pending or isinstance(failure, WorkerDied):
            self.close()
        if failure is not None:
            raise failure
        if pending:
            raise TimeoutError(f"ranks {sorted(pending.values())} of {world} did not answer within {timeout_s} s")
        return results


def free_port() -> int:
    """Return a port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(connection: Connection, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    held: dict[str, Any] = {}
    answer: tuple[Any, WorkerError | None]
    is_frozen = False
    num_threads = _num_threads()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        function, rendezvous, args = request
        try:
            called = resolve(function) if isinstance(function, str) else function
            answer = called(Rank(rendezvous, held), *args), None
        except Exception as error:  # noqa: BLE001  # becomes the caller's error
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            answer = None, WorkerError(kind, str(error), traceback.format_exc())
        connection.send(answer)
        del answer
        if not held and not is_frozen:
            # These are imported modules, a million objects that no collection needs to walk again.
            gc.collect()
            gc.freeze()
            is_frozen = True
        if _num_threads() > num_threads + MORE_THREADS:
            gc.collect()
            num_threads = _num_threads()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
