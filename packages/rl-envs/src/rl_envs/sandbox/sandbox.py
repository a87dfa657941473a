"""The near side of a sandbox: starts its zygote and hands programs to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import rl_envs
from rl_core.errors import RLError
from rl_envs.sandbox import frames, preflight
from rl_envs.sandbox.cancellation import Cancellation
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.program import Isolation, Limits, Outcome, Program, request_of
from rl_envs.sandbox.remote import RemoteSandbox

GRACE_S = 60.0
"""Seconds beyond a program's own limit after which its keeper counts as hanging."""
START_TIMEOUT_S = 120.0
"""Maximum number of seconds until a zygote is ready."""
END_TIMEOUT_S = 10.0
"""Maximum number of seconds that a zygote whose socket is closed is waited for."""


class SandboxUnavailable(RLError):
    """Raised if the machine does not offer the level of isolation that the settings ask for."""


class SandboxFailed(RLError):
    """Raised if a program could not be run for a reason outside the program."""


class Runner(Protocol):
    """Runs programs: a sandbox on this machine, or on another."""

    def run(self, program: Program, limits: Limits | None = None, cancellation: Cancellation | None = None) -> Outcome:
        """Run a program to its end, or until it is cancelled."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


def open_sandbox(config: SandboxConfig) -> Runner:
    """Return the sandbox with these settings, ready to run programs.

    Raises:
        SandboxUnavailable: If the machine does not offer the isolation.
        SandboxFailed: If a server of sandboxes does not answer.
    """
    if config.url is not None:
        return RemoteSandbox(config.url, limits=config.limits)
    return Sandbox(config.isolation, limits=config.limits, python_path=config.python_path, commands=config.commands)


def machine_problem(config: SandboxConfig) -> str:
    """Return why programs cannot be contained on this machine, and what to do; an empty string if they can.

    A sandbox is opened, in which a program tries to get out.
    """
    try:
        with Sandbox(config.isolation, python_path=config.python_path, commands=config.commands):
            return ""
    except SandboxUnavailable as error:
        return str(error)


class Sandbox:
    """Runs programs on this machine, each in its own process that is forked from a clean Python.

    Threads may share one. A program never sees this process: not its memory, its descriptors or its variables.

    Args:
        isolation: The level, which is verified from inside before the first program.
        limits: Limits of programs that come without their own.
        python_path: Folders with packages that programs may import.
        commands: Folders with commands that programs may execute; only with the isolation `namespaces`.

    Raises:
        SandboxUnavailable: If the machine does not offer the level.
    """

    def __init__(
        self,
        isolation: Isolation = "namespaces",
        *,
        limits: Limits | None = None,
        python_path: Sequence[str] = (),
        commands: Sequence[str] = (),
    ) -> None:
        assert not commands or isolation == "namespaces", "SandboxConfig refuses others"
        self.isolation = isolation
        self.limits = limits or Limits()
        self._python_path = tuple(os.path.abspath(path) for path in python_path)
        self._commands = tuple(os.path.abspath(path) for path in commands)
        self._lock = threading.Lock()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()
        try:
            self._verify()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, program: Program, limits: Limits | None = None, cancellation: Cancellation | None = None) -> Outcome:
        """Run a program to its end, within its limits.

        Args:
            program: The program.
            limits: Its limits; those of the sandbox if None.
            cancellation: Ends the program, from another thread.

        Raises:
            SandboxFailed: If it could not be run, or was cancelled.
        """
        limits = limits or self.limits
        with self.connect() as connection, (cancellation or Cancellation()).ending(connection):
            connection.settimeout(limits.wall_s + GRACE_S)
            with self._failures(limits):
                frames.write(connection, *request_of(program, limits))
                return outcome_of(*frames.read(connection))

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        """The connection to a keeper of one program, which ends the program when the connection is closed."""
        near, far = socket.socketpair()
        with near:
            with far, self._lock:
                if self._zygote is None or self._zygote.poll() is not None:
                    self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"p"], [far.fileno()])
            yield near

    def close(self) -> None:
        """End the sandbox and whatever runs in it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            try:
                self._zygote.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
            self._zygote = None

    def _start(self) -> None:
        near, far = socket.socketpair()
        folder = str(Path(rl_envs.__file__).parents[1])
        code = (
            f"import sys; sys.path.insert(0, {folder!r}); from rl_envs.sandbox.zygote import main; "
            f"sys.path.pop(0); main({far.fileno()}, {self.isolation!r}, {self._python_path!r}, {self._commands!r})"
        )
        with far:
            self._zygote = subprocess.Popen(
                # without the packages and the variables of this process; sets are ordered alike in every program
                [sys.executable, "-s", "-S", "-P", "-c", code],
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
                cwd="/",
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = near
        near.settimeout(START_TIMEOUT_S)
        try:
            header, _ = frames.read(near)
        except (ConnectionError, TimeoutError):
            self.close()
            raise SandboxFailed("the sandbox's first process ended before it was ready; see its stderr") from None
        if header["problem"]:
            self.close()
            raise SandboxUnavailable(_unavailable(self.isolation, header["problem"]))

    def _verify(self) -> None:
        if self.isolation == "limits":
            return
        try:
            with preflight.bait() as (program, limits):
                outcome = self.run(program, limits)
        except SandboxFailed as error:
            raise SandboxUnavailable(_unavailable(self.isolation, str(error))) from None
        if problem := preflight.problem(outcome, limits):
            raise SandboxUnavailable(_unavailable(self.isolation, problem))

    @contextlib.contextmanager
    def _failures(self, limits: Limits) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise SandboxFailed(
                f"the sandbox gave no answer within {limits.wall_s:g} s and {GRACE_S:g} s more"
            ) from None
        except ConnectionError:
            raise SandboxFailed("the sandbox's process ended while it ran a program") from None


def outcome_of(header: dict[str, Any], parts: list[bytes]) -> Outcome:
    """A keeper's answer as an outcome.

    Raises:
        SandboxFailed: If it could not run the program.
    """
    if problem := header.get("problem"):
        raise SandboxFailed(f"the sandbox could not run a program: {problem}")
    stdout, stderr, snapshot = parts
    return Outcome(
        header["ending"],
        header["exit_code"],
        header["signal"],
        stdout,
        stderr,
        seconds=float(header["seconds"]),
        is_complete=header["is_complete"],
        snapshot=snapshot,
        snapshot_problem=header["snapshot_problem"],
    )


def _unavailable(isolation: Isolation, problem: str) -> str:
    weaker = {"namespaces": "landlock", "landlock": "limits"}.get(isolation)
    contains = "contains programs by rules" if weaker == "landlock" else "contains accidents only, not hostile programs"
    remedy = f"Set `sandbox.isolation: {weaker}`, which {contains}, or `sandbox.url` to a server of sandboxes."
    return f"the sandbox with isolation {isolation} does not work on this machine: {problem}. {remedy}"
