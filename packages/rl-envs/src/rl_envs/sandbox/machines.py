"""Sandboxes of services: each program gets a machine of its own, and a supervisor on it runs the program."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from rl_core.errors import InfrastructureFailed
from rl_envs.sandbox import supervisor, tree
from rl_envs.sandbox.program import Cancellation, Ending, Limits, Outcome, Program
from rl_envs.sandbox.relay import Relay
from rl_envs.sandbox.runner import SandboxFailed
from rl_envs.sandbox.tree import TreeEntry

GRACE_S = 60.0
"""Seconds beyond a program's own limit that a service may take to open a machine, run the program and report."""
CLOSE_TIMEOUT_S = 30.0
"""Seconds that a service may take to close a machine. A machine that is not closed by then is left to the service."""
MARGIN_S = 15.0
"""Seconds beyond a program's own limit within which its supervisor reports."""
RELAY_SOCKET = "/rl_relay/socket"
"""Socket of a machine by which its supervisor connects programs to the address of their relay."""
_FILES = "/tmp/rl_program"
_SIZE = struct.Struct("!Q")
_MAX_REASON = 500
_SUPERVISOR = Path(supervisor.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class MachineRequest:
    """A machine for one program.

    Args:
        image: Image or template of the machine; empty for the default of the service.
        limits: Limits of the program. Its supervisor enforces them; a service that can do so enforces them too.
        has_network: True if the program must reach addresses outside the machine.
        relay: Address that the program reaches through `relay_socket`; None for no address.
        place: Folder of the image that is replaced by the program's working copy; empty for none.
    """

    image: str
    limits: Limits
    has_network: bool = False
    relay: Relay | None = None
    place: str = ""


class SandboxService(Protocol):
    """A service that lends machines. `sandbox.service` takes a class with these methods, which is called without
    arguments; threads share the object.

    Every method may raise any exception: the rollout begins again, and the exception is its reason. Read keys from
    environment variables.
    """

    def open(self, request: MachineRequest) -> Any:
        """Return a new machine, for one program."""

    def run(self, machine: Any, supervisor: str, job: bytes, timeout_s: float) -> bytes | Outcome:
        """Run the supervisor, a program in Python, on a machine, and return its report.

        `python3 supervisor.py JOB REPORT` reads a job from a file, which it removes, and writes its report to another.
        The current folder is the folder of the program. With `- -` the job comes on standard input, which stays open,
        and the report goes to standard output.

        Args:
            machine: Machine from `open`.
            supervisor: Source of the supervisor.
            job: Contents of the file for it.
            timeout_s: Seconds after which the supervisor has reported, or has been ended by the program.

        Returns:
            The report; or an outcome, if the supervisor has ended without a report.
        """

    def close(self, machine: Any) -> None:
        """End a machine with all that runs on it. It is called once, perhaps while `run` runs in another thread."""


class ServiceSandbox:
    """Runs programs on machines of a service, which is responsible for their isolation.

    Args:
        service: The service.
        limits: Limits of programs that come without their own.
        image: Image of programs that come without their own.
        place: Description of the place; empty if the machines run here, and reach a relay.
    """

    def __init__(
        self, service: SandboxService, *, limits: Limits | None = None, image: str = "", place: str = "the service"
    ) -> None:
        self._service, self._image, self.place = service, image, place
        self.limits = limits or Limits()

    def run(self, program: Program, limits: Limits | None = None, cancellation: Cancellation | None = None) -> Outcome:
        """Run a program to its end.

        Args:
            program: The program.
            limits: Its limits; the limits of the sandbox if None.
            cancellation: Closes the machine of the program, from another thread.

        Raises:
            SandboxFailed: If the service could not run it, or it was cancelled.
        """
        limits, cancellation = limits or self.limits, cancellation or Cancellation()
        mark = secrets.token_hex(16)
        job = job_of(program, limits, mark, keeps_variables=bool(program.image or self._image))
        request = MachineRequest(
            program.image or self._image, limits, program.has_network, program.relay, program.place
        )
        until, timeout_s = time.monotonic() + limits.wall_s + GRACE_S, limits.wall_s + MARGIN_S
        service, closing = self._service, threading.Lock()
        try:
            if cancellation.is_cancelled:
                raise SandboxFailed("it was cancelled before")
            machine = _within(until, lambda: service.open(request), service.close)

            def close() -> None:
                if closing.acquire(blocking=False):
                    service.close(machine)

            try:
                # The thread that cancels does not wait for the service.
                with cancellation.ending(lambda: threading.Thread(target=close, daemon=True).start()):
                    answer = _within(until, lambda: service.run(machine, _SUPERVISOR, job, timeout_s))
            finally:
                # A service that cannot close a machine ends it later, and the outcome is known.
                with contextlib.suppress(Exception):
                    _within(time.monotonic() + CLOSE_TIMEOUT_S, close)
        except Exception as error:
            if cancellation.is_cancelled:
                raise SandboxFailed("the program was cancelled") from None
            if isinstance(error, InfrastructureFailed):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise SandboxFailed(f"{self.place or 'the sandbox'} failed: {reason:.{_MAX_REASON}}") from None
        return answer if isinstance(answer, Outcome) else read_report(answer, limits)

    def close(self) -> None:
        """Do nothing: no machine outlives its program."""


def _within(until: float, call: Callable[[], Any], undo: Callable[[Any], object] | None = None) -> Any:
    """Return the result of a call; leave it to a thread if it takes too long, and undo its late result.

    Raises:
        TimeoutError: If it takes too long.
    """
    found: list[Any] = []
    lock, is_late = threading.Lock(), False

    def called() -> None:
        try:
            result, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - the caller raises it
            result, error = None, raised
        with lock:
            found.append((result, error))
            late = is_late
        if late and error is None and undo is not None:
            with contextlib.suppress(Exception):
                undo(result)

    thread = threading.Thread(target=called, daemon=True)
    begin = time.monotonic()
    thread.start()
    thread.join(max(0.0, until - begin))
    with lock:
        if not found:
            is_late = True
            raise TimeoutError(f"it has not answered for {time.monotonic() - begin:.0f} s")
    [(result, error)] = found
    if isinstance(error, Exception):
        raise error
    if error is not None:
        # The end that a service wants for this process is for its own thread only.
        raise RuntimeError(f"{type(error).__name__}: {error}")
    return result


def run_with_files(
    supervisor: str,
    job: bytes,
    write: Callable[[str, bytes], object],
    execute: Callable[[str], int | None],
    read: Callable[[str], Any],
) -> bytes | Outcome:
    """Run the supervisor on a machine that has files and a shell: the body of `SandboxService.run` for most services.

    Args:
        supervisor: Source of the supervisor.
        job: The job.
        write: Writes a file of the machine, by its path.
        execute: Runs a command in a shell of the machine, and returns its exit code.
        read: Reads a file.
    """
    write(f"{_FILES}.py", supervisor.encode())
    write(f"{_FILES}.job", job)
    folder = f"mkdir {_FILES} && cd {_FILES}"
    code = execute(f"{folder} && python3 {_FILES}.py {_FILES}.job {_FILES}.report; exit $?")
    if code == 0:
        report: bytes = read(f"{_FILES}.report")
        return report
    if code is not None and code > 128:
        # The program has killed its supervisor, which has the same user.
        return Outcome("signal", signal=min(code - 128, 64))
    reason = "the machine needs python3 of version 3.7 or newer" if code == 127 else "the supervisor has failed"
    raise SandboxFailed(f"{reason} (exit code {code})")


def job_of(program: Program, limits: Limits, mark: str, *, keeps_variables: bool = False) -> bytes:
    """Return the job of a program for a supervisor.

    Args:
        program: The program.
        limits: Its limits.
        mark: A secret that shows, in the hands of the supervisor, that Python has come to its end.
        keeps_variables: True if the program keeps the environment variables of its machine.
    """
    files = [TreeEntry(name, content) for name, content in program.files.items()]
    source = program.source.encode(errors="replace")
    parts = [source, program.stdin, program.tree or (tree.pack(files) if files else b"")]
    header = {
        "command": program.command,
        "variables": dict(program.variables),
        "folder": program.folder,
        "place": program.place,
        "snapshot": program.snapshot,
        "limits": asdict(limits),
        "mark": mark,
        "keeps_variables": keeps_variables,
        "relay_port": program.relay.port if program.relay else 0,
        "relay_socket": RELAY_SOCKET,
        "parts": [len(part) for part in parts],
    }
    encoded = json.dumps(header).encode()
    return b"".join((_SIZE.pack(len(encoded)), encoded, *parts))


def max_report_bytes(limits: Limits) -> int:
    """Return the maximum number of bytes of a report: the output, the snapshot and their description."""
    return 2 * limits.output_kib * 1024 + 2 * limits.scratch_mib * 2**20 + 2**20


def read_report(data: Any, limits: Limits) -> Outcome:
    """Convert a supervisor's report to an outcome.

    Raises:
        SandboxFailed: If it is not a report of a program with these limits.
    """
    try:
        if len(data) > max_report_bytes(limits):
            raise ValueError(f"it has {len(data)} bytes")
        (size,) = _SIZE.unpack(data[-_SIZE.size :])
        end = len(data) - _SIZE.size - size
        if end < 0 or size > 2**20:
            raise ValueError("its description is cut off")
        report = json.loads(data[end : end + size])
        ending, code, number = report["ending"], report["exit_code"], report["signal"]
        sizes, seconds, problem = report["parts"], report["seconds"], report["snapshot_problem"]
        is_whole = all(type(each) is int and each >= 0 for each in sizes) and sum(sizes) == end and len(sizes) == 3
        if not is_whole or ending not in get_args(Ending) or not isinstance(problem, str):
            raise ValueError("a part is missing")
        is_code = type(code) is int and 0 <= code <= 255 if ending == "exit" else code is None
        is_number = type(number) is int and 0 < number < 128 if ending == "signal" else number is None
        is_complete = report["is_complete"]
        if not is_code or not is_number or type(is_complete) is not bool or not math.isfinite(seconds):
            raise ValueError("its end is not described")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise SandboxFailed(f"the sandbox sent a malformed report: {error!r:.200}") from None
    limit, (first, second, _) = limits.output_kib * 1024, sizes
    stdout, stderr = bytes(data[: min(first, limit)]), bytes(data[first : first + min(second, limit)])
    return Outcome(
        ending,
        code,
        number,
        stdout,
        stderr,
        float(seconds),
        is_complete,
        b"" if problem else bytes(data[first + second : end]),
        problem[:_MAX_REASON],
    )
