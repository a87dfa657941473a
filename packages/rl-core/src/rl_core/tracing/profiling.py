"""Profiles of a process between a start and a stop, by one or more tools.

Every worker uses this module: ranks of models through their host (`rl_core.ray.host`), generators in the process and
thread of their engine. A tool that fails is reported and never raises: a profile is not worth a run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from rl_core.user_code import resolve

Tool = Literal["torch", "memory", "nsys", "py-spy"]
"""A tool of `profiling.tools`."""

PY_SPY_RATE = 100
"""Samples per second."""

_START_S = 0.5
_STOP_TIMEOUT_S = 120.0
"""py-spy writes what it sampled when it is stopped, which takes long on a busy machine."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

PTRACE_REMEDY = (
    "py-spy may not read this process. Give it the right: run the container with --cap-add=SYS_PTRACE, or set the "
    "sysctl kernel.yama.ptrace_scope to 0"
)


@dataclass(frozen=True)
class ProfileOrder:
    """The record to make of a process.

    Args:
        folder: Folder of the files, shared with the driver.
        name: Prefix of the files, such as `policy-0`.
        tools: Tools, which record at the same time.
        py_spy: Path of the program `py-spy`.
    """

    folder: str
    name: str
    tools: tuple[Tool, ...]
    py_spy: str = "py-spy"

    def of_rank(self, rank: int, num_ranks: int) -> ProfileOrder:
        """Return the order of one of the processes that the worker consists of."""
        return self if num_ranks == 1 else replace(self, name=f"{self.name}-rank{rank}")

    def path(self, ending: str) -> Path:
        """Return the path of a file."""
        return Path(self.folder) / f"{self.name}.{ending}"


@dataclass(frozen=True)
class ProfileReport:
    """The result of a start or a stop.

    Args:
        files: Files that were written.
        problems: Tools that failed, with the reason.
    """

    files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @classmethod
    def joined(cls, reports: Sequence[ProfileReport]) -> ProfileReport:
        """Return the report of several processes."""
        return cls(
            tuple(file for each in reports for file in each.files),
            tuple(problem for each in reports for problem in each.problems),
        )


class Recorder(Protocol):
    """One tool; built from a `ProfileOrder`, and used once. Both methods are called in the same thread."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self) -> Path | None:
        """End, write the file and return it; None if the tool writes it later."""


class Profile:
    """The recorders of a process. `start` and `stop` are called in the thread that computes."""

    def __init__(self) -> None:
        self._name = ""
        self._recorders: dict[Tool, Recorder] = {}

    def start(self, order: ProfileOrder) -> ProfileReport:
        """Begin to record with every tool of an order; a recording in progress ends first."""
        ended = self.stop()
        problems = list(ended.problems)
        self._name = order.name
        for tool in order.tools:
            try:
                Path(order.folder).mkdir(parents=True, exist_ok=True)
                recorder: Recorder = resolve(_RECORDERS[tool])(order)
                recorder.start()
            except Exception as error:  # noqa: BLE001 - a tool that fails costs its file, not the run
                problems.append(self._problem(tool, error))
            else:
                self._recorders[tool] = recorder
        return ProfileReport(ended.files, tuple(problems))

    def stop(self) -> ProfileReport:
        """End the recording and write the files; nothing if there is none."""
        recorders, self._recorders = self._recorders, {}
        files: list[str] = []
        problems: list[str] = []
        # The last that began ends first, so that no tool records how another one writes its file.
        for tool, recorder in reversed(recorders.items()):
            try:
                path = recorder.stop()
            except Exception as error:  # noqa: BLE001 - as in `start`
                problems.append(self._problem(tool, error))
            else:
                files += [] if path is None else [str(path)]
        return ProfileReport(tuple(files), tuple(problems))

    def _problem(self, tool: Tool, error: Exception) -> str:
        return f"{self._name}: {tool} failed: {type(error).__name__}: {str(error).strip() or 'no reason given'}"


class PySpyRecorder:
    """Samples the stacks of all threads of this process with `py-spy record`, in the format of speedscope."""

    def __init__(self, order: ProfileOrder) -> None:
        self._program = order.py_spy
        self._path = order.path("py-spy.json")
        self._process: subprocess.Popen[bytes] | None = None
        # Not a pipe, which nobody would empty: py-spy writes a line whenever it is late.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop` or a failure

    def start(self) -> None:
        """Start py-spy, which this process lets read its memory.

        Raises:
            PermissionError: With the remedy, if py-spy has no permission.
            RuntimeError: If it ends for another reason.
            FileNotFoundError: If it is not installed on this node.
        """
        _let_read_memory(is_allowed=True)
        command = [self._program, "record", "--pid", str(os.getpid()), "--format", "speedscope"]
        command += ["--output", str(self._path), "--rate", str(PY_SPY_RATE), "--threads"]
        # A thread of a Ray actor with coroutines blocks signals, which a child process inherits.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._said
            )
        except OSError:
            self._end()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            self._process.wait(_START_S)
        except subprocess.TimeoutExpired:
            return
        raise self._failure()

    def stop(self) -> Path:
        """Make py-spy write its file.

        Raises:
            PermissionError, RuntimeError: As `start`, if it ended meanwhile.
        """
        assert self._process is not None, "it has been started"
        try:
            if self._process.poll() is not None:
                raise self._failure()
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_STOP_TIMEOUT_S)
            if not self._path.is_file():
                raise RuntimeError(f"py-spy wrote no {self._path}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise RuntimeError(f"py-spy did not write its file within {_STOP_TIMEOUT_S:g} s") from None
        finally:
            self._end()
        return self._path

    def _failure(self) -> Exception:
        assert self._process is not None
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        self._end()
        if "ermission" in text or "ptrace" in text:
            return PermissionError(PTRACE_REMEDY)
        return RuntimeError(f"py-spy ended with exit code {self._process.returncode}: {text[-500:]}")

    def _end(self) -> None:
        _let_read_memory(is_allowed=False)
        self._said.close()


def _let_read_memory(*, is_allowed: bool) -> None:
    """Let a child process read this one's memory, where the kernel allows it to parents only (yama)."""
    tracer = _PR_SET_PTRACER_ANY if is_allowed else ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, tracer, 0, 0, 0)


_RECORDERS: Mapping[Tool, str] = {
    "torch": "rl_core.torch.recorders:TorchRecorder",
    "memory": "rl_core.torch.recorders:MemoryRecorder",
    "nsys": "rl_core.torch.recorders:NsysRange",
    "py-spy": f"{__name__}:PySpyRecorder",
}
