"""A thread that ends the driver when its main thread cannot."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import psutil

from rl_core.errors import WorkerDied
from rl_core.rollouts.judging import JudgeBudgetSpent
from rl_launch.cluster.ray_nodes import GCS, KEEPER, RAYLET, LocalRay, state_of
from rl_launch.placement.bundles import DevicesLost

if TYPE_CHECKING:
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.run_session import RunSession

_log = logging.getLogger(__name__)

FROZEN_S = 30.0
"""Maximum time in seconds that the raylet may be stopped. Ray gives up a node after 65 s, and its driver then waits
forever."""

WITHOUT_GCS_S = 45.0
"""Maximum time in seconds of a step without Ray's control service. Ray ends the driver without a message after 60 s."""

UNWIND_S = 25.0
"""Timeout in seconds of the end of a start, a restart or a run after a signal that ends it at once."""

CLOSE_S = 120.0
"""Timeout in seconds of the end of workers and of Ray after the last step."""

SILENT_CLOSE_S = 10.0
"""Maximum time in seconds that the end waits for processes of Ray that are stopped or have ended."""

CONNECT_MARGIN_S = 30.0
"""Additional seconds for the connection to Ray after its start."""

_POLL_S = 0.5
_NODE_POLL_S = 10.0
_REPORT_S = 5.0
_ABANDON_S = 10.0
_RESUMABLE, _FAILED = os.EX_TEMPFAIL, 1
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DriverWatch:
    """Ends this process in bounded time if it can make no further step and its main thread does not notice.

    The main thread may be in a call of Ray that neither returns nor handles signals, and Ray ends the process without a
    message if its raylet dies. This thread notices that Ray's processes have ended or are stopped, that the main thread
    does not handle a signal, and that a wait exceeds its timeout. It then writes the reason to the log and to the run
    directory, and exits; the Ray that this process started is killed after it.

    Args:
        run: The session. It must be entered.
    """

    def __init__(self, run: RunSession) -> None:
        self._run = run
        self._cluster: VirtualCluster | None = None
        self._ray: LocalRay | None = None
        self._is_over = threading.Event()
        # The thread that ends the process keeps this lock, so that the main thread stops in `__exit__`.
        self._ending = threading.Lock()
        self._signals, self._wakeup = socket.socketpair()
        self._woken_before = -1
        self._num_signals = 0
        self._signalled: float | None = None
        self._bound: tuple[float, BaseException | None] | None = None
        self._is_closing = False
        self._looked_at = time.monotonic()
        self._silent: dict[str, float] = {}
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="driver-watch", daemon=True)

    def __enter__(self) -> Self:
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._woken_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        with self._ending:
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(self._woken_before)
        self._thread.join()
        self._signals.close()
        self._wakeup.close()

    def watch(self, cluster: VirtualCluster) -> None:
        """Watch the processes of a cluster too."""
        self._cluster, self._ray = cluster, cluster.local_ray()

    @contextmanager
    def bounded(self, timeout_s: float, error: BaseException) -> Iterator[None]:
        """Return a context with a timeout in seconds. The process ends with the error if it takes longer."""
        self._bound = (time.monotonic() + timeout_s, error)
        try:
            yield
        finally:
            self._bound = None

    def begin_close(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Set the timeout of the end of workers and of Ray. The arguments are the same as for `__exit__`."""
        self._bound, self._is_closing = (time.monotonic() + CLOSE_S, error), True

    def _watch(self) -> None:
        while not self._is_over.is_set():
            poll = select.poll()
            poll.register(self._signals, select.POLLIN)
            for connection in self._connections():
                poll.register(connection, select.POLLRDHUP)
            events = [descriptor for descriptor, _ in poll.poll(1000 * _POLL_S)]
            if self._is_over.is_set():
                return
            if set(events) & set(self._connections()):
                self._lose()
            now = time.monotonic()
            if self._signals.fileno() in events:
                self._num_signals += sum(number in _SIGNALS for number in self._signals.recv(4096))
                if self._num_signals:
                    self._signalled = now
            if self._ray is not None:
                self._check_ray(self._ray, now)
            if self._signalled and now > self._signalled + UNWIND_S and self._run.is_ending(self._num_signals):
                self._end(SystemExit(128 + signal.SIGTERM), _RESUMABLE)
            if self._bound is not None:
                end, error = self._bound
                if self._is_closing and self._silent:
                    end = min(end, max(end - CLOSE_S, *self._silent.values()) + SILENT_CLOSE_S)
                if now > end:
                    self._end(error, self._code_of(error))

    def _connections(self) -> list[int]:
        return self._ray.connections if self._ray is not None and not self._is_closing else []

    def _code_of(self, error: BaseException | None) -> int:
        """Return the exit code of a run that ends with this error."""
        if error is None:
            return 0 if self._run.is_finished else _RESUMABLE
        resumable = DevicesLost | WorkerDied | JudgeBudgetSpent
        return _RESUMABLE if isinstance(error, resumable) or not isinstance(error, Exception) else _FAILED

    def _check_ray(self, ray: LocalRay, now: float) -> None:
        for name, process in ray.processes.items():
            self._judge(name, process.pid, state_of(process), now)
        if not self._is_closing and now > self._looked_at + _NODE_POLL_S:
            self._looked_at = now
            if ray.is_given_up():
                self._give_up("Ray has given up the driver's node: its raylet did not answer")

    def _judge(self, name: str, pid: int, state: str, now: float) -> None:
        if state == psutil.STATUS_DEAD and not self._is_closing:
            if name == GCS:
                # Steps do not need it, and Ray's other processes end after a minute without it.
                self._report(f"{name}, process {pid}, ended; the run saves and ends after this step")
                self._run.interrupt(f"{name} ended")
            else:
                self._lose()
        if state not in (*_STOPPED, psutil.STATUS_DEAD):
            self._silent.pop(name, None)
            return
        waited = now - self._silent.setdefault(name, now)
        if state == psutil.STATUS_DEAD:
            if name == GCS and waited > WITHOUT_GCS_S and not self._is_closing:
                self._give_up(f"{name}, process {pid}, ended, and the step under way did not")
            return
        if waited > _REPORT_S:
            limit = f"; the run ends if it is stopped for {FROZEN_S:g} s" if name == RAYLET else ""
            self._report(f"{name}, process {pid}, is stopped{limit}. To continue it: kill -CONT {pid}")
        if name == RAYLET and waited > FROZEN_S and not self._is_closing:
            self._give_up(f"{name}, process {pid}, was stopped for {FROZEN_S:g} s")

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            _log.warning("%s", text)

    def _lose(self) -> None:
        assert self._ray is not None
        self._ray.mute()
        # The kernel ends all of them together with their keeper.
        ended = {name: each.pid for name, each in self._ray.processes.items() if state_of(each) == psutil.STATUS_DEAD}
        name = next((each for each in (KEEPER, RAYLET) if each in ended), RAYLET)
        pid = self._ray.processes[name].pid
        killed = "it or one of its agents" if name == RAYLET else "it"
        self._give_up(
            f"{name}, process {pid}, ended: {killed} was killed, by someone or for lack of memory (see dmesg)"
        )

    def _give_up(self, why: str) -> None:
        where = f"checkpoint step_{self._run.saved}" if self._run.saved else "the beginning, as nothing was saved yet"
        self._end(DevicesLost(f"{why}. The same command resumes the run from {where}."), _RESUMABLE)

    def _end(self, error: BaseException | None, code: int) -> None:
        """End this process."""
        self._ending.acquire()
        if self._is_over.is_set():
            self._ending.release()
            return
        if isinstance(error, Exception):
            _log.error("%s", error)
        elif error is None:
            _log.warning("Ray's processes did not end; they are killed")
        else:
            _log.warning("the run did not end within %g s after a signal; its processes are killed", UNWIND_S)
        last = threading.Thread(target=self._run.abandon, args=(error,), daemon=True)
        last.start()
        last.join(_ABANDON_S)
        if self._cluster is not None:
            self._cluster.kill()
        logging.shutdown()
        os._exit(code)
