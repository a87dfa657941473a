"""Output of an engine's processes: passed on, and read for the cause when they die."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from threading import Lock, Thread

NUM_LINES = 2000
"""Maximum number of lines that are kept."""

_PREFIX = re.compile(
    r"^(?:\((?P<process>[^()]+ pid=\d+)\) )?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]+\] ?)?"
    r"(?:\[rank\d+\]: ?)?"
)
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed))(?:: (?P<message>.*))?$")
_FATAL = re.compile(r"^Fatal Python error: .+|^terminate called after throwing .+")
_LOST = re.compile(r"^Worker proc (?P<name>\S+) died unexpectedly \(exit code: (?P<code>-?\d+)\)")
_CONTINUED = ("During handling of the above exception", "The above exception was the direct cause")
_POINTERS = (
    "WorkerProc initialization failed",
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "Executor failed",
    "cancelled",
)
"""Messages that only point at the cause, or follow from it."""


class EngineOutput:
    """Standard output and error of the processes that are started under `captured`."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._lock = Lock()
        self._reader: Thread | None = None

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Make processes started in this block write to a pipe; its lines are copied to this process's standard error.

        This process writes there too inside the block, because file descriptors belong to it as a whole.
        """
        # The tracker would inherit the pipe and outlive the engine.
        resource_tracker.ensure_running()
        read_end, write_end = os.pipe()
        saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._reader = Thread(target=self._read, args=(read_end, os.dup(saved[2])), name="engine-output", daemon=True)
        self._reader.start()
        _flush()
        for fd in saved:
            os.dup2(write_end, fd)
        os.close(write_end)
        try:
            yield
        finally:
            _flush()
            for fd, original in saved.items():
                os.dup2(original, fd)
                os.close(original)

    def cause(self, timeout_s: float) -> str:
        """Wait for the processes to end, or for the time-out; return the cause of their end in one line, or nothing if
        they gave none.
        """
        if self._reader is not None:
            self._reader.join(timeout_s)
        with self._lock:
            return cause_in(self._lines)

    def _read(self, source: int, target: int) -> None:
        with os.fdopen(source, "rb") as lines:
            for line in lines:
                with suppress(OSError):  # This process's own output may be closed.
                    os.write(target, line)
                with self._lock:
                    self._lines.append(line.decode(errors="replace").rstrip())
        os.close(target)


def cause_in(lines: Iterable[str]) -> str:
    """Return the first exception, or other fatal report, that ends a traceback in the output of an engine's processes.

    The first is the root: other processes fail after it, and because of it. Exceptions that were logged as warnings,
    and exceptions that led to a further one in the same traceback, are left out.
    """
    found: list[str] = []
    last_in: dict[str, int] = {}
    for line in lines:
        prefix = _PREFIX.match(line)
        assert prefix is not None
        process, text = prefix["process"] or "", line[prefix.end() :]
        if prefix["level"] in ("DEBUG", "INFO", "WARNING"):
            continue
        if text.startswith(_CONTINUED) and process in last_in:
            found[last_in.pop(process)] = ""
        elif report := _report(text):
            last_in[process] = len(found)
            found.append(report)
    return next((report for report in found if report), "")


def _report(text: str) -> str:
    if lost := _LOST.match(text):
        return f"{lost['name']} {end_of(int(lost['code']))}"
    if _FATAL.match(text):
        return text
    exception = _EXCEPTION.match(text)
    if exception is None or any(pointer in text for pointer in _POINTERS):
        return ""
    if exception["kind"].rpartition(".")[2] in ("SystemExit", "KeyboardInterrupt", "EngineDeadError"):
        return ""
    return text


def end_of(exit_code: int) -> str:
    """Return in words how a process ended."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def ends_of(processes: Sequence[BaseProcess]) -> str:
    """Return in words how the processes that failed have ended; empty if none failed."""
    codes = [(process.name, process.exitcode) for process in processes]
    return ", ".join(f"{name} {end_of(code)}" for name, code in codes if code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
