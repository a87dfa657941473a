"""The keeper of one program: a process outside its sandbox that starts it, feeds it, limits it and ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

from rl_envs.sandbox import interpreter, tree
from rl_envs.sandbox.confinement import SCRATCH, Confinement, confine, enter_namespaces, map_user, mount_scratch
from rl_envs.sandbox.kernel import syscalls
from rl_envs.sandbox.processes import ControlGroup, ProcessTable, SandboxUsage
from rl_envs.sandbox.program import (
    MAX_FRAME,
    MAX_HEADER,
    Ending,
    Limits,
    Program,
    encoded_frame,
    program_of,
    read_frame,
    write_frame,
)
from rl_envs.sandbox.relay import BUFFER_BYTES, Relay, RelayProcess
from rl_envs.sandbox.scratch import temporary_folder

_STATUS = struct.Struct("=i")
_UNCONFINED = -1
_CHUNK = 2**16
_FIRST_LOOK_S, _LOOK_S, _SHORTEST_LOOK_S = 0.03, 0.02, 0.002
_FILL_RATE = 2**31
"""Bytes of memory per second that one processor can fill."""
MAX_LOCKS = 1000
"""Maximum number of locks of records of files of a program; the kernel has memory for each, and no limit."""
_END = 10
"""Smallest descriptor for the report of a command's end; programs expect the first ones to be free."""
MAX_SNAPSHOT = 2**27
"""Maximum number of bytes of a snapshot's files, so that it fits a message."""


class UnconfinedError(Exception):
    """Raised if a program could not be confined, and was not run."""


class Site(NamedTuple):
    """The surroundings of the programs that keepers start.

    Args:
        confinement: Confinement of the programs.
        table: The processes of the machine.
        python_path: Folders that programs import from.
        commands: Folders of commands that programs may execute, the one of Python first.
        groups: Descriptor of the folder of their control groups; None on a machine without.
    """

    confinement: Confinement
    table: ProcessTable
    python_path: tuple[str, ...]
    commands: tuple[str, ...] = ()
    groups: int | None = None


@dataclass
class StreamOutput:
    """The part of a program's stream that was read."""

    descriptor: int
    limit: int
    data: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    def read(self) -> bytes:
        """Read available bytes, and note in `is_over` the end or more bytes than the limit."""
        chunk = os.read(self.descriptor, _CHUNK)
        self.data += chunk
        if not chunk or len(self.data) > self.limit:
            self.is_over = True
        return chunk

    @property
    def overflows(self) -> bool:
        """Return whether there is more than the limit."""
        return len(self.data) > self.limit


def keep(connection: socket.socket, site: Site, slot: int) -> None:
    """Read one program from a connection, run it, and answer with its outcome."""
    header, parts = read_frame(connection)
    started = time.monotonic()
    program, limits = program_of(header, parts)
    uid = site.confinement.uid(slot)
    with contextlib.ExitStack() as stack:
        # The group must be made before the program's namespaces, which hide it.
        group = None
        if site.groups is not None:
            group = stack.enter_context(contextlib.closing(ControlGroup(site.groups, limits)))
        scratch = stack.enter_context(_scratch(site.confinement, site.table, limits, uid, program.relay))
        if program.tree:
            tree.write(tree.unpack(program.tree, limits.scratch_mib * 2**20), scratch, uid)
        for name, content in program.files.items():
            with open(os.path.join(scratch, name), "xb") as file:
                file.write(content)
                os.fchown(file.fileno(), uid, -1)
        syscalls.adopt_orphans()
        keeper = _Keeper(connection, program, limits, site.table)
        keeper.start(site, uid, scratch, group)
        try:
            ending, status = keeper.watch(started + limits.wall_s)
        finally:
            site.table.end_descendants()
        if group is not None and group.is_exhausted():
            ending, status = "memory", None
        snapshot, problem = _snapshot(program, scratch, limits)
    code, number = None, status if ending == "signal" else None
    if ending == "exit" and status is not None:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            ending = "cpu" if number == signal.SIGXCPU else "signal"
        else:
            code = os.WEXITSTATUS(status)
    answer = {
        "ending": ending,
        "exit_code": code,
        "signal": number,
        "seconds": time.monotonic() - started,
        # A command in Python reports that it came to its end.
        "is_complete": os.read(keeper.end, 64) == keeper.mark,
        "snapshot_problem": problem,
    }
    outputs = [bytes(output.data[: output.limit]) for output in (keeper.stdout, keeper.stderr)]
    with contextlib.suppress(ConnectionError):
        # The other side may not have taken all output yet.
        connection.setblocking(True)
        connection.sendall(keeper.unsent)
        write_frame(connection, answer, [*([b"", outputs[1]] if program.interactive else outputs), snapshot])


class _Keeper:
    """A running program and its streams."""

    def __init__(self, connection: socket.socket, program: Program, limits: Limits, table: ProcessTable) -> None:
        self._connection = connection
        self._program = program
        self._limits = limits
        self._table = table
        self._unwritten = memoryview(program.stdin)
        self.unsent = bytearray()
        self._is_closed = False

    def start(self, site: Site, uid: int, scratch: str, group: ControlGroup | None) -> None:
        """Start the program's first process, which starts the program itself."""
        stdin, self._stdin = os.pipe()
        stdout, out = os.pipe()
        stderr, err = os.pipe()
        self._status, status = os.pipe()
        self.end, end = os.pipe()
        self.mark = secrets.token_bytes(16)
        self._init = os.fork()
        if self._init == 0:
            run = partial(_be_program, site, uid, scratch, group, (stdin, out, err, status), end, self.mark)
            _be_init(site, partial(run, self._program, self._limits), status)
        for descriptor in (stdin, out, err, status, end):
            os.close(descriptor)
        limit = self._limits.output_kib * 1024
        self.stdout, self.stderr = StreamOutput(stdout, limit), StreamOutput(stderr, limit)
        os.set_blocking(self._stdin, False)
        if not self._unwritten and not self._program.interactive:
            self._close_stdin()

    def watch(self, deadline: float) -> tuple[Ending, int | None]:
        """Serve its streams until it ends or is at a limit; return the status of `waitpid` if it ended by itself."""
        self._poll = poll = select.poll()
        for descriptor in (self.stdout.descriptor, self.stderr.descriptor, self._status, self._connection.fileno()):
            poll.register(descriptor, select.POLLIN)
        if not self._is_closed and self._unwritten:
            poll.register(self._stdin, select.POLLOUT)
        look, unseen = time.monotonic() + _FIRST_LOOK_S, frozenset[int]()
        while True:
            if (now := time.monotonic()) >= deadline:
                return "deadline", None
            if now >= look:
                usage = self._table.usage(self._init)
                if ending := _over(usage, self._limits):
                    return ending, None
                if usage.unseen & unseen:  # A process cannot be counted.
                    return "processes", None
                unseen = usage.unseen
                look = now + _pause(usage, self._limits)
            for descriptor, events in poll.poll(max(1, 1000 * (min(deadline, look) - now))):
                if descriptor == self._status:
                    return self._ended()
                if descriptor == self._stdin:
                    self._feed(poll)
                elif descriptor == self._connection.fileno():
                    if events & select.POLLOUT:
                        self._send()
                    if events & ~select.POLLOUT and not self._take_input(poll):
                        return "deadline", None  # The other side has closed the connection.
                else:
                    output = self.stdout if descriptor == self.stdout.descriptor else self.stderr
                    self._pass_on(output, output.read())
                    if output.is_over:
                        poll.unregister(descriptor)
                    if output.overflows:
                        return "output", None

    def _ended(self) -> tuple[Ending, int | None]:
        """Return the status of the program, whose last output may still be in the pipes."""
        data = os.read(self._status, 2**12)
        for output in (self.stdout, self.stderr):
            os.set_blocking(output.descriptor, False)
            with contextlib.suppress(BlockingIOError):
                while not output.is_over:
                    self._pass_on(output, output.read())
            if output.overflows:
                return "output", None
        if len(data) < _STATUS.size:
            return "signal", signal.SIGKILL
        (status,) = _STATUS.unpack_from(data)
        if status == _UNCONFINED:
            raise UnconfinedError(data[_STATUS.size :].decode(errors="replace"))
        return "exit", status

    def _pass_on(self, output: StreamOutput, chunk: bytes) -> None:
        """Send on the stdout of an interactive program; its limit is for each answer."""
        if self._program.interactive and output is self.stdout and chunk:
            self.unsent += encoded_frame({"output": True}, [chunk])
            self._poll.modify(self._connection.fileno(), select.POLLIN | select.POLLOUT)

    def _send(self) -> None:
        """Send on as much as the other side takes now. A keeper that waited for it would not check the limits."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            del self.unsent[: self._connection.send(self.unsent, socket.MSG_DONTWAIT)]
        if not self.unsent:
            self._poll.modify(self._connection.fileno(), select.POLLIN)

    def _take_input(self, poll: select.poll) -> bool:
        """Take more input for an interactive program; return False if the other side closed the connection."""
        try:
            _, parts = read_frame(self._connection)
        except ConnectionError:
            return False
        if not self._is_closed:
            self.stdout.data.clear()
            self._unwritten = memoryview(bytes(self._unwritten) + b"".join(parts))
            poll.register(self._stdin, select.POLLOUT)
        return True

    def _feed(self, poll: select.poll) -> None:
        try:
            written = os.write(self._stdin, self._unwritten[:_CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # It does not read its input.
            self._unwritten = memoryview(b"")
        else:
            self._unwritten = self._unwritten[written:]
        if not self._unwritten:
            poll.unregister(self._stdin)
            if not self._program.interactive:
                self._close_stdin()

    def _close_stdin(self) -> None:
        os.close(self._stdin)
        self._is_closed = True


def _be_init(site: Site, run_program: Callable[[], NoReturn], status: int) -> NoReturn:
    """Be the first process of the program's namespace: start it, wait for it, report its status."""
    try:
        syscalls.die_with_parent()
        syscalls.adopt_orphans()
        child = os.fork()
        if child == 0:
            run_program()
        os.dup2(status, 3)
        os.closerange(4, 2**16)
        for descriptor in range(3):
            os.close(descriptor)
        if site.confinement.isolation == "namespaces":
            syscalls.drop_capabilities()
        while True:
            pid, code = os.wait()
            if pid == child:
                os.write(3, _STATUS.pack(code))
                break
    finally:
        os._exit(0)


def _be_program(
    site: Site,
    uid: int,
    scratch: str,
    group: ControlGroup | None,
    streams: tuple[int, int, int, int],
    end: int,
    mark: bytes,
    program: Program,
    limits: Limits,
) -> NoReturn:
    """Become the program.

    Args:
        site: Place of all programs.
        uid: Its user id.
        scratch: Its scratch folder.
        group: Its control group; None on a machine without.
        streams: Descriptors of stdin, stdout, stderr and of the report that it could not be confined.
        end: Descriptor for the report that a command in Python came to its end.
        mark: Bytes of that report.
        program: The program.
        limits: Its limits.
    """
    try:
        os.setsid()
        if group is not None:
            group.join()
        # A command that is executed does not inherit the descriptor of its end.
        own_end = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _END)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(4, own_end)
        os.closerange(own_end + 1, 2**16)
        if not program.command:
            os.close(own_end)
        confine(site.confinement, limits, uid, scratch, program.relay.port if program.relay else 0)
        os.chdir(os.path.join(scratch, program.folder))
    except BaseException as error:  # noqa: BLE001  # The program must not run after any error.
        os.write(3, _STATUS.pack(_UNCONFINED) + f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(3)
    if not program.command:
        interpreter.run(program.source, path=site.python_path, folder=scratch)
    interpreter.run_command(
        program.command,
        path=site.python_path,
        folder=scratch,
        variables=program.variables,
        commands=site.commands,
        completed=lambda: os.write(own_end, mark),
    )


@contextlib.contextmanager
def _scratch(
    confinement: Confinement, table: ProcessTable, limits: Limits, uid: int, relay: Relay | None
) -> Iterator[str]:
    """Enter a context with the scratch folder of one program: its own filesystem, or a folder that is removed."""
    if confinement.isolation == "namespaces":
        process = None if relay is None else RelayProcess(relay)
        uid_here, gid_here = os.getuid(), os.getgid()
        if confinement.user_namespace:
            # The processes of a new user namespace are counted separately.
            enter_namespaces(syscalls.PROGRAM_NAMESPACES | syscalls.CLONE_NEWUSER)
            map_user(table, uid_here, gid_here)
        else:
            enter_namespaces(syscalls.PROGRAM_NAMESPACES)
        if process is not None:
            for buffer in ("rmem", "wmem"):
                with contextlib.suppress(OSError):  # A container may lack the settings; connections are few.
                    table.write(f"sys/net/ipv4/tcp_{buffer}", f"4096 {BUFFER_BYTES} {BUFFER_BYTES}")
            process.listen()
        mount_scratch(limits.scratch_mib, uid, uid, executes=bool(confinement.executable))
        yield SCRATCH
        return
    if relay is not None:
        raise UnconfinedError(
            f"isolation {confinement.isolation} cannot limit a program's network to one address; use namespaces"
        )
    with temporary_folder(uid) as folder:
        yield folder


def _snapshot(program: Program, scratch: str, limits: Limits) -> tuple[bytes, str]:
    """Return the files that a program leaves in the requested folder, and why they cannot be read; one is empty."""
    if program.snapshot is None:
        return b"", ""
    folder = os.path.join(scratch, program.snapshot)
    try:
        # The folder itself may have become a link.
        if os.path.realpath(folder) != os.path.normpath(folder) or not os.path.isdir(folder):
            return b"", f"the folder {program.snapshot} is gone"
        most = min(limits.scratch_mib * 2**20, MAX_SNAPSHOT)
        archive = tree.pack(tree.read(folder, most))
    except (tree.UnusableTree, OSError) as error:
        return b"", str(error)
    if len(archive) + 2 * limits.output_kib * 1024 + MAX_HEADER > MAX_FRAME:
        return b"", f"its files and their names take {len(archive)} bytes, too many for a message"
    return archive, ""


def _over(usage: SandboxUsage, limits: Limits) -> Ending | None:
    """Return the limit that a program is beyond."""
    if usage.memory > limits.memory_mib * 2**20 or usage.locks > MAX_LOCKS:
        return "memory"
    return "processes" if usage.tasks > limits.max_tasks else None


def _pause(usage: SandboxUsage, limits: Limits) -> float:
    """Return the seconds until the next check: fewer, the sooner several processes can fill the memory that is left.

    A single process is bounded by the limit of its address space.
    """
    room = limits.memory_mib * 2**20 - usage.memory
    fillers = min(usage.tasks, os.cpu_count() or 1)
    return _LOOK_S if fillers < 2 else min(_LOOK_S, max(_SHORTEST_LOOK_S, room / (fillers * _FILL_RATE)))
