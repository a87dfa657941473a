"""The near side of a sandbox: starts its zygote, checks it from inside, and hands programs to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rl_envs
from rl_core import resolve
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.machines import ServiceSandbox
from rl_envs.sandbox.program import (
    Cancellation,
    Isolation,
    Limits,
    Outcome,
    Program,
    read_frame,
    request_of,
    shut,
    write_frame,
)
from rl_envs.sandbox.remote import RemoteSandbox
from rl_envs.sandbox.runner import Runner, SandboxFailed, SandboxUnavailable
from rl_envs.sandbox.scratch import temporary_folder

GRACE_S = 60.0
"""Seconds that a keeper may take beyond its program's own limit before it counts as hanging."""
START_TIMEOUT_S = 120.0
"""Maximum number of seconds until a zygote is ready."""
END_TIMEOUT_S = 10.0
"""Maximum number of seconds that a zygote whose socket is closed is waited for."""


SERVICES = {
    "docker": "rl_envs.sandbox.containers:Docker",
    "podman": "rl_envs.sandbox.containers:Podman",
    "e2b": "rl_envs.sandbox.e2b:E2B",
    "modal": "rl_envs.sandbox.modal:Modal",
}
"""Classes of the services that have a short name."""


def open_sandbox(config: SandboxConfig) -> Runner:
    """Return the sandbox with these settings, ready to run programs.

    Raises:
        SandboxUnavailable: If the machine does not offer the isolation, or the service cannot be used from here.
    """
    if config.url is not None:
        return RemoteSandbox(config.url, limits=config.limits, key_env=config.key_env)
    if config.service is None:
        return Sandbox(config.isolation, limits=config.limits, python_path=config.python_path, commands=config.commands)
    try:
        service: Any = resolve(SERVICES.get(config.service, config.service))()
    except SandboxUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - a service of the user's may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SandboxUnavailable(f"sandbox.service {config.service} cannot be used here: {reason}") from None
    place = "" if getattr(service, "is_local", False) else f"the service {config.service}"
    return ServiceSandbox(service, limits=config.limits, image=config.image, place=place)


def machine_problem(config: SandboxConfig) -> str:
    """Return why programs cannot run by these settings, and what to do; an empty string if they can.

    A program tries to get out of a sandbox of this machine. A service runs a harmless program, unless the rows have its
    image.
    """
    try:
        with contextlib.closing(open_sandbox(config)) as runner:
            if not isinstance(runner, Sandbox) and (config.image or runner.place):
                outcome = runner.run(Program("print(6 * 7)"))
                if outcome.stdout != b"42\n":
                    return f"a harmless program does not run: {outcome.describe(config.limits)}"
            return ""
    except (SandboxUnavailable, SandboxFailed) as error:
        return str(error)


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Runs programs on this machine, each in its own process that is forked from a clean Python.

    Threads may share one. A program never sees this process: not its memory, its descriptors or its variables.

    Args:
        isolation: Level of isolation, which a program verifies from inside before the first program runs.
        limits: Limits of programs that come without their own.
        python_path: Folders with packages that programs may import.
        commands: Folders with commands that programs may execute; only with the isolation `namespaces`.

    Raises:
        SandboxUnavailable: If the machine does not offer the level.
    """

    place = ""

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
        if isolation == "limits":
            return
        try:
            with probe() as (program, limits_of_probe):
                problem = probe_problem(self.run(program, limits_of_probe), limits_of_probe)
            if problem:
                raise SandboxUnavailable(_unavailable(isolation, problem))
        except SandboxFailed as error:
            self.close()
            raise SandboxUnavailable(_unavailable(isolation, str(error))) from None
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, program: Program, limits: Limits | None = None, cancellation: Cancellation | None = None) -> Outcome:
        """Run a program to its end, within its limits.

        Args:
            program: The program.
            limits: Its limits; the limits of the sandbox if None.
            cancellation: Ends the program, from another thread.

        Raises:
            SandboxFailed: If it could not be run, or was cancelled.
        """
        limits = limits or self.limits
        with self.connect() as connection, (cancellation or Cancellation()).ending(partial(shut, connection)):
            connection.settimeout(limits.wall_s + GRACE_S)
            try:
                write_frame(connection, *request_of(program, limits))
                return outcome_of(*read_frame(connection))
            except TimeoutError:
                waited = f"{limits.wall_s:g} s and {GRACE_S:g} s more"
                raise SandboxFailed(f"the sandbox gave no answer within {waited}") from None
            except ConnectionError:
                raise SandboxFailed("the sandbox's process ended while it ran a program") from None

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        """Connect to a keeper of one program, which ends the program when the connection is closed."""
        near, far = socket.socketpair()
        with near:
            with far, self._lock:
                if not self._is_usable():
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

    def _is_usable(self) -> bool:
        """Return whether the sandbox's first process is there. One that a signal has stopped is killed."""
        if self._zygote is None or self._zygote.poll() is not None:
            return False
        stat = Path(f"/proc/{self._zygote.pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] not in "Tt":
            return True
        self._zygote.kill()
        self._zygote.wait()
        return False

    def _start(self) -> None:
        near, far = socket.socketpair()
        folder = str(Path(rl_envs.__file__).parents[1])
        code = (
            f"import sys; sys.path.insert(0, {folder!r}); from rl_envs.sandbox.zygote import main; "
            f"sys.path.pop(0); main({far.fileno()}, {self.isolation!r}, {self._python_path!r}, {self._commands!r})"
        )
        with far:
            self._zygote = subprocess.Popen(
                # Python starts without the packages and the variables of this process; sets have one order everywhere.
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
            header, _ = read_frame(near)
        except (ConnectionError, TimeoutError):
            self.close()
            raise SandboxFailed("the sandbox's first process ended before it was ready; see its stderr") from None
        if header["problem"]:
            self.close()
            raise SandboxUnavailable(_unavailable(self.isolation, header["problem"]))


def outcome_of(header: dict[str, Any], parts: list[bytes]) -> Outcome:
    """Convert a keeper's answer to an outcome.

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


_LIMITS = Limits(cpu_s=20.0, wall_s=60.0, processes=8)

_PROBE = """
import ctypes, json, os, socket, sys
bait = json.load(sys.stdin)
breaches = []

def tries(name):
    def run(attempt):
        try:
            attempt()
        except (OSError, ProcessLookupError, RuntimeError):
            return
        breaches.append(name)
    return run

@tries("it reads a file outside its folder")
def read():
    open(bait["file"]).read()

@tries("it writes a file outside its folder")
def write():
    open(bait["file"] + ".written", "w").close()

@tries("it connects to a port of the machine")
def connect():
    socket.create_connection(("127.0.0.1", bait["port"]), timeout=5).close()

@tries("it may send signals to other processes")
def signal():
    os.kill(bait["pid"], 0)

@tries("it sees the machine's processes")
def processes():
    os.listdir(f"/proc/{bait['pid']}")

@tries("it makes a namespace of its own")
def namespace():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError("refused")

if len(os.listdir()) or os.environ.keys() - {"HOME", "TMPDIR", "LANG"}:
    breaches.append("its folder or its environment is not empty")
with open("own", "w") as file:
    file.write("works")
print(json.dumps(breaches))
"""


@contextlib.contextmanager
def probe() -> Iterator[tuple[Program, Limits]]:
    """Enter a context with a program that reports its ways out of the sandbox, and the limits to run it with."""
    with temporary_folder(os.getuid()) as folder, socket.create_server(("127.0.0.1", 0)) as port:
        # Any user of the machine may read and write the file.
        os.chmod(folder, 0o777)
        file = os.path.join(folder, "bait")
        with open(file, "w") as opened:
            opened.write("bait")
        os.chmod(file, 0o666)
        given = {"file": file, "port": port.getsockname()[1], "pid": os.getpid()}
        yield Program(_PROBE, stdin=json.dumps(given).encode()), _LIMITS


def probe_problem(outcome: Outcome, limits: Limits) -> str:
    """Return the program's ways out of the sandbox, or why it could not report; empty if it is contained."""
    if not outcome.ok:
        return f"a harmless program does not run: {outcome.describe(limits)}"
    return "; ".join(f"a program gets out: {breach}" for breach in json.loads(outcome.stdout))
