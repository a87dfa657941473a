"""Containers of this machine as machines for programs, by the commands `docker` and `podman`."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from typing import Any

from rl_envs.sandbox.confinement import SCRATCH
from rl_envs.sandbox.machines import RELAY_SOCKET, MachineRequest, max_report_bytes
from rl_envs.sandbox.program import Outcome
from rl_envs.sandbox.relay import MAX_CONNECTIONS, connect
from rl_envs.sandbox.runner import SandboxFailed, SandboxUnavailable

COMMAND_TIMEOUT_S = 60.0
"""Maximum number of seconds of a command that asks for the state of the engine or removes a container."""
PULL_TIMEOUT_S = 1800.0
"""Maximum number of seconds until an image is pulled."""
SUPERVISOR_MIB = 64
"""Memory in MiB of a container for its supervisor, in addition to its program's and to its files."""
SUPERVISOR_TASKS = 8
"""Processes and threads of a container in addition to its program's."""
LABEL = "rl-sandbox"
"""Label of all containers, to list them: `docker ps --filter label=rl-sandbox`."""
_MAX_STDERR = 4000
_ENGINE_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 125, 126, 127


class _Container:
    """A container that is to be started.

    Args:
        request: Request of its program.
        name: Name of the container.
        opened: Closes the relay of the program.
    """

    def __init__(self, request: MachineRequest, name: str, opened: contextlib.ExitStack) -> None:
        self.request, self.name, self.opened = request, name, opened
        self.process: subprocess.Popen[bytes] | None = None
        self.mounts: list[str] = []
        self.is_closed = False
        self.lock = threading.Lock()


class Containers:
    """Runs each program in a container of its own, which has an image and no network.

    The root of a container is read-only; its program writes to folders in memory. The container ends with the process
    that started it, whose end closes its standard input, and is removed then.

    Args:
        command: `docker` or `podman`, or another command with the same arguments.

    Raises:
        SandboxUnavailable: If the command does not work here.
    """

    is_local = True

    def __init__(self, command: str) -> None:
        self._command = command
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._images: set[str] = set()
        remedy = "Install it and make its service available to this user, or leave sandbox.service unset"
        if shutil.which(command) is None:
            raise SandboxUnavailable(f"{command} is not installed on this machine. {remedy}.")
        try:
            self._engine("ps", "--quiet", "--filter", f"label={LABEL}")
        except SandboxFailed as error:
            raise SandboxUnavailable(f"{error}. {remedy}.") from None

    def open(self, request: MachineRequest) -> _Container:
        """Return a container for one program, whose image is pulled if it is not here."""
        image = request.image
        if not image or image.startswith("-"):
            raise SandboxFailed(f"a container needs an image, got {image!r}; set sandbox.image, or `image` in the row")
        with self._locks[image]:
            if image not in self._images:
                with contextlib.suppress(SandboxFailed):
                    self._engine("image", "inspect", image)
                    self._images.add(image)
            if image not in self._images:
                self._engine("pull", "--quiet", image, timeout_s=PULL_TIMEOUT_S)
                self._images.add(image)
        with contextlib.ExitStack() as opened:
            container = _Container(request, f"{LABEL}-{secrets.token_hex(8)}", opened)
            if request.relay is not None:
                folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="rl-relay-"))
                # The container's user may have another id here.
                os.chmod(folder, 0o755)
                path = os.path.join(folder, os.path.basename(RELAY_SOCKET))
                port = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                port.bind(path)
                os.chmod(path, 0o666)
                port.listen(MAX_CONNECTIONS)
                opened.callback(port.shutdown, socket.SHUT_RDWR)
                room = threading.BoundedSemaphore(MAX_CONNECTIONS)
                threading.Thread(target=_accept, args=(port, request.relay, room), daemon=True).start()
                # The program's port may be one that only root may open elsewhere.
                container.mounts = ["--sysctl", "net.ipv4.ip_unprivileged_port_start=0"]
                container.mounts += ["--volume", f"{folder}:{os.path.dirname(RELAY_SOCKET)}"]
            container.opened = opened.pop_all()
        return container

    def run(self, machine: _Container, supervisor: str, job: bytes, timeout_s: float) -> bytes | Outcome:
        """Run the supervisor as the first process of the container."""
        request, limits = machine.request, machine.request.limits
        memory = f"{limits.memory_mib + limits.scratch_mib + SUPERVISOR_MIB}m"
        folders = [SCRATCH, "/tmp", *([request.place] if request.place else [])]
        options = f"rw,exec,nosuid,nodev,size={limits.scratch_mib}m,mode=1777"
        arguments = [
            *(self._command, "run", "--rm", "--interactive", "--pull", "never", "--name", machine.name),
            *("--label", LABEL, "--network", "none", "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--memory", memory, "--memory-swap", memory),
            *("--pids-limit", str(limits.processes + SUPERVISOR_TASKS)),
            *("--ulimit", f"nofile={max(limits.open_files, 64)}:{max(limits.open_files, 64)}", "--ulimit", "core=0:0"),
            *(word for folder in folders for word in ("--tmpfs", f"{folder}:{options}")),
            *("--workdir", SCRATCH, *machine.mounts, "--entrypoint", "python3", request.image),
            *("-c", supervisor, "-", "-"),
        ]
        with machine.lock:
            if machine.is_closed:
                raise SandboxFailed("the program was cancelled")
            machine.process = process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        said = bytearray()
        threads = [
            threading.Thread(target=_send, args=(process.stdin, job), daemon=True),
            threading.Thread(target=_keep_first, args=(process.stderr, said), daemon=True),
        ]
        ended = threading.Timer(timeout_s, process.kill)
        for thread in (*threads, ended):
            thread.start()
        report, most, begin = bytearray(), max_report_bytes(limits), time.monotonic()
        stdout: Any = process.stdout
        while len(report) <= most and (chunk := stdout.read1(2**20)):
            report += chunk
        if len(report) > most:
            raise SandboxFailed(f"the container sent more than {most} bytes")
        code = process.wait()
        ended.cancel()
        threads[1].join(1.0)
        reason = said.decode(errors="replace").strip()[-300:]
        if code == 0:
            return bytes(report)
        if code == _NOT_FOUND:
            raise SandboxFailed(f"the image {request.image} needs python3 of version 3.7 or newer: {reason}")
        if code in (_ENGINE_FAILED, _NOT_EXECUTABLE) or code < 0 or reason:
            raise SandboxFailed(f"{self._command} could not run a container of {request.image} ({code}): {reason}")
        # The kernel ended the container for its memory, its first process included.
        return Outcome("memory", seconds=time.monotonic() - begin)

    def close(self, machine: _Container) -> None:
        """End the container, if it has not ended."""
        with machine.lock:
            machine.is_closed, process = True, machine.process
        if process is not None:
            if process.poll() is None or process.returncode:
                # The command may have ended before the container. Podman would wait before it kills.
                for arguments in (("kill", machine.name), ("rm", "--force", machine.name)):
                    with contextlib.suppress(SandboxFailed):
                        self._engine(*arguments)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    if stream is not None and stream is not process.stdin:
                        stream.close()
        machine.opened.close()

    def _engine(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        command = [self._command, *arguments]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxFailed(f"`{' '.join(command)}` failed: {error}") from None
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxFailed(f"`{' '.join(command)}` failed: {reason or done.returncode}")


class Docker(Containers):
    """Containers of Docker."""

    def __init__(self) -> None:
        super().__init__("docker")


class Podman(Containers):
    """Containers of Podman."""

    def __init__(self) -> None:
        super().__init__("podman")


def _accept(port: socket.socket, relay: Any, room: threading.BoundedSemaphore) -> None:
    with contextlib.suppress(OSError):
        while True:
            room.acquire()
            near, _ = port.accept()
            threading.Thread(target=connect, args=(near, relay, room), daemon=True).start()


def _send(stream: Any, job: bytes) -> None:
    """Send a job; the stream stays open, because its end ends the program."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(job)
        stream.flush()


def _keep_first(stream: Any, said: bytearray) -> None:
    with contextlib.suppress(OSError, ValueError):
        while chunk := stream.read1(2**16):
            said += chunk[: max(0, _MAX_STDERR - len(said))]
