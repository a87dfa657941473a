"""Runs one program on a machine of a service, within limits, and reports how it ended.

This file is sent to the machine as text and runs there by itself, on Python 3.7 or newer. It imports the standard
library only. `python3 supervisor.py JOB REPORT` reads a job of `rl_envs.sandbox.machines.job_of` and writes the report
that `read_report` reads; without arguments they are `rl_job` and `rl_report`. With `-` for both, the job comes on
standard input, the report goes to standard output, and the program is ended when standard input is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import posixpath
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

_SIZE = struct.Struct("!Q")
_POLL_S = 0.05
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_LEFT_OUT = (".git", "__pycache__")
_MAX_ENTRIES, _MAX_PATH = 100_000, 1024
# The files of `exit` and `quit`, whose callers end the program.
_QUITTERS = ("<frozen _sitebuiltins>", "_sitebuiltins.py")

# It runs Python's part of a job as `__main__`, and writes the mark of the job when Python has come to its end, unless a
# file of the program that is not its main file ended it. The descriptors, not the folder, have the mark.
LAUNCHER = """
import os, random, sys
given, end = int(sys.argv[1]), int(sys.argv[2])
with open(given, "rb") as file:
    mark, home, place = (file.readline().rstrip(b"\\n") for _ in range(3))
    source = file.read()
home, place = os.fsdecode(home), os.fsdecode(place)
command = sys.argv[3:]
leave = os._exit
code, is_end, own = 0, True, sys._getframe().f_code.co_filename

def places_of(trace):
    found = []
    while trace:
        found.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return [place for place in found if place not in (own, "<frozen runpy>") and place != runpy.__file__]

import runpy
sys.path[:] = [path for path in sys.path if path not in ("", ".", home)]
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(100_000)
for name in ("stdin", "stdout"):
    if hasattr(getattr(sys, name), "reconfigure"):
        getattr(sys, name).reconfigure(encoding="utf-8", errors="surrogateescape")
random.seed(0)
try:
    if not command:
        import linecache, types
        text = source.decode()
        sys.path.append(home)
        sys.argv[:] = ["program.py"]
        linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "program.py", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    elif command[0] == "-m" and len(command) > 1:
        sys.path.append(os.getcwd())
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c" and len(command) > 1:
        sys.path.append(os.getcwd())
        sys.argv[:] = ["-c", *command[2:]]
        exec(compile(command[1], "<command>", "exec", dont_inherit=True), {"__name__": "__main__"})
    else:
        sys.path.append(os.path.dirname(os.path.abspath(command[0])))
        sys.argv[:] = command
        runpy.run_path(os.path.abspath(command[0]), run_name="__main__")
except SystemExit as error:
    code = error.code
    places = [place for place in places_of(error.__traceback__) if not place.endswith(QUITTERS)] or [""]
    is_end = places[0] == places[-1] or not places[-1].startswith((home + "/", (place or home) + "/"))
    if code is None or isinstance(code, int):
        code = (code or 0) & 255
    else:
        print(code, file=sys.stderr)
        code = 1
except BaseException as error:
    code = 1
    try:
        import traceback
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (own, "<frozen runpy>", runpy.__file__):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    except BaseException:
        os.write(2, type(error).__name__.encode(errors="replace") + b"\\n")
try:
    import threading
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
except BaseException:
    code = 1
if is_end:
    os.write(end, mark)
leave(code)
""".replace("QUITTERS", repr(_QUITTERS))


def main() -> None:
    """Run the job of the command line."""
    libc = ctypes.CDLL(None)
    # Programs of the same user can neither read the mark of the job in this process nor outlive their job.
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    given, wanted = sys.argv[1:3] or (os.path.abspath("rl_job"), os.path.abspath("rl_report"))
    with open(0 if given == "-" else given, "rb", buffering=0, closefd=given != "-") as file:
        (size,) = _SIZE.unpack(_exactly(file, _SIZE.size))
        job = json.loads(_exactly(file, size).decode())
        source, stdin, tree = (_exactly(file, length) for length in job["parts"])
    if given != "-":
        os.remove(given)
    if not sys.argv[1:]:
        # A server may have files of its own in the current folder.
        os.chdir(tempfile.mkdtemp(dir=os.getcwd()))
    home = os.path.realpath(os.getcwd())
    if job["place"]:
        # The working copy is where the image has its own, so that whatever was installed from there finds it.
        job["place"] = os.path.realpath(job["place"])
        for name in os.listdir(job["place"]):
            path = os.path.join(job["place"], name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
        os.symlink(job["place"], os.path.join(home, job["folder"]))
        job["command"] = [_expanded(word, home) for word in job["command"]]
        job["variables"] = {name: _expanded(value, home) for name, value in job["variables"].items()}
    if tree:
        _unpack(tree, home)
    report, parts = _run(job, source, stdin, home, watched=given == "-")
    with open(1 if wanted == "-" else wanted, "wb", closefd=wanted != "-") as file:
        for part in parts:
            file.write(part)
        if job["snapshot"]:
            written = _Counted(file)
            report["snapshot_problem"] = _pack(os.path.join(home, job["snapshot"]), written, job["limits"])
            report["parts"] = [*map(len, parts), written.count]
        else:
            report["parts"] = [*map(len, parts), 0]
        encoded = json.dumps(report).encode()
        file.write(encoded + _SIZE.pack(len(encoded)))


def _exactly(file: Any, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = file.read(min(size - len(received), 2**20))
        if not chunk:
            sys.exit("the job is cut off")
        received += chunk
    return bytes(received)


def _expanded(word: str, home: str) -> str:
    return home + word[1:] if word.startswith("~/") else word


def _unpack(tree: bytes, home: str) -> None:
    with tempfile.TemporaryFile(dir=home) as file:
        file.write(tree)
        file.seek(0)
        # The archive was made and checked by the sender.
        trusted: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(home, **trusted)


def _run(
    job: dict[str, Any], source: bytes, stdin: bytes, home: str, watched: bool
) -> tuple[dict[str, Any], list[bytes]]:
    """Run the program of a job to its end, or to one of its limits."""
    limits, command = job["limits"], job["command"]
    image = os.environ if job["keeps_variables"] else {"PATH": os.environ.get("PATH", os.defpath)}
    variables = {**image, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **job["variables"]}
    is_python = not command or command[0].rpartition("/")[2].startswith("python")
    arguments, ends, given = list(command), os.pipe(), None
    if is_python:
        given = tempfile.TemporaryFile(dir=home)  # noqa: SIM115  # The program inherits it.
        given.write(b"\n".join((job["mark"].encode(), os.fsencode(home), os.fsencode(job["place"]), source)))
        given.seek(0)
        python = shutil.which(command[0], path=variables["PATH"]) if command else None
        head = [python or sys.executable, "-c", LAUNCHER, str(given.fileno()), str(ends[1])]
        arguments = [*head, *command[1:]]
    relay = _relay_port(job["relay_port"])
    oom_kills = _oom_kills()
    pipes = os.pipe(), os.pipe()
    begin = time.monotonic()
    with tempfile.TemporaryFile(dir=home) as input_file:
        input_file.write(stdin)
        input_file.seek(0)
        streams = input_file.fileno(), pipes[0][1], pipes[1][1]
        kept = [given.fileno(), ends[1]] if given else []
        try:
            child = os.fork()
        except OSError as error:
            if command:
                sys.exit(f"the machine cannot start a process: {error}")
            # The program takes the place of this process, and the service reports on it.
            _become(arguments, (streams[0], 1, 2), kept, variables, limits, home)
        if not child:
            os.setsid()
            _become(arguments, streams, kept, variables, limits, os.path.join(home, job["folder"]))
    for descriptor in (ends[1], *streams[1:]):
        os.close(descriptor)
    if relay is not None:
        threading.Thread(target=_serve, args=(relay, job["relay_socket"]), daemon=True).start()
    outputs, ending, status = _watch(child, [pipes[0][0], pipes[1][0]], limits, begin, watched)
    seconds = time.monotonic() - begin
    os.set_blocking(ends[0], False)
    try:
        is_complete = os.read(ends[0], 64) == job["mark"].encode()
    except BlockingIOError:
        is_complete = False
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ending == "exit" and number is not None:
        ending = "signal"
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and used.ru_utime + used.ru_stime >= limits["cpu_s"]):
            ending, number = "cpu", None
        elif number == signal.SIGKILL and _oom_kills() > oom_kills:
            ending, number = "memory", None
    code = os.WEXITSTATUS(status) if ending == "exit" else None
    return {
        "ending": ending,
        "exit_code": code,
        "signal": number if ending == "signal" else None,
        "seconds": seconds,
        "is_complete": bool(command) and is_complete and ending == "exit",
        "snapshot_problem": "",
    }, outputs


def _become(
    arguments: list[str],
    streams: tuple[int, int, int],
    kept: list[int],
    variables: dict[str, str],
    limits: dict[str, Any],
    folder: str,
) -> None:
    """Make this process the program."""
    is_python = bool(kept)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    for descriptor in set(map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else range(256))):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    os.chdir(folder)
    cpu, scratch = math.ceil(limits["cpu_s"]), limits["scratch_mib"] * 2**20
    wanted = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (scratch, scratch),
    }
    wanted[resource.RLIMIT_NOFILE] = (limits["open_files"],) * 2
    if is_python:
        # Other runtimes reserve addresses that they never use.
        wanted[resource.RLIMIT_AS] = (limits["memory_mib"] * 2**20,) * 2
    for limit, (soft, hard) in wanted.items():
        highest = resource.getrlimit(limit)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(limit, (soft, hard))
    try:
        os.execvpe(arguments[0], arguments, variables)
    except OSError as error:
        if not is_python:
            os.write(2, f"{arguments[0]} cannot be executed: {error.strerror}\n".encode())
            os._exit(127)
    # The machine executes no files: Python runs in this process.
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = arguments[2:]
    exec(compile(LAUNCHER, "<launcher>", "exec"), {"__name__": "__main__"})


def _watch(
    child: int, pipes: list[int], limits: dict[str, Any], begin: float, watched: bool
) -> tuple[list[bytes], str, int]:
    """Read the output of a program until it ends; return the output, the reason of the end and the exit status."""
    most = limits["output_kib"] * 1024
    outputs, ending, opened = [bytearray(), bytearray()], "exit", list(pipes)
    status: int | None = None
    woken, wake = os.pipe()
    for descriptor in (*pipes, woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    checked = begin
    while ending == "exit":
        pid, found = os.waitpid(child, os.WNOHANG)
        if pid:
            status = found
            break
        ready = select.select([*opened, woken, *([0] if watched else [])], [], [], _POLL_S)[0]
        if watched and 0 in ready and not os.read(0, 1):
            _end_all(child, None)
            os._exit(1)
        if woken in ready:
            os.read(woken, 1024)
        for descriptor in [each for each in opened if each in ready]:
            if not _read_some(descriptor, outputs[pipes.index(descriptor)], most):
                opened.remove(descriptor)
        now = time.monotonic()
        if max(map(len, outputs)) > most:
            ending = "output"
        elif now - begin > limits["wall_s"]:
            ending = "deadline"
        elif now - checked > 2 * _POLL_S:
            checked, (num_tasks, resident) = now, _usage()
            if resident > limits["memory_mib"] * 2**20:
                ending = "memory"
            elif num_tasks > limits["processes"]:
                ending = "processes"
    status = _end_all(child, status)
    for descriptor in opened:
        output = outputs[pipes.index(descriptor)]
        while len(output) <= most and _read_some(descriptor, output, most):
            pass
    if ending == "exit" and max(map(len, outputs)) > most:
        ending = "output"
    return [bytes(output[:most]) for output in outputs], ending, status


def _read_some(descriptor: int, output: bytearray, most: int) -> bool:
    """Add what a pipe has to an output, at most one byte more than its limit; False if there is nothing."""
    try:
        chunk = os.read(descriptor, min(2**16, most + 1 - len(output)))
    except BlockingIOError:
        return False
    output += chunk
    return bool(chunk)


def _end_all(child: int, status: int | None) -> int:
    """Kill a program with all its processes, which this process inherits when their parents end.

    Returns:
        The exit status of the program.
    """
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for pid in _descendants() or ([child] if status is None else []):
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        try:
            while True:
                pid, found = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid == child:
                    status = found
        except ChildProcessError:
            break
        time.sleep(0.002)
    with contextlib.suppress(OSError):
        # Processes of the group may have been started meanwhile, or there is no /proc.
        os.killpg(child, signal.SIGKILL)
    return signal.SIGKILL if status is None else status


def _stats() -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield parent, number of threads and resident bytes of each process by its id."""
    page = resource.getpagesize()
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in filter(str.isdigit, names):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            yield int(name), (int(fields[1]), int(fields[17]), int(fields[21]) * page)


def _descendants() -> dict[int, tuple[int, int, int]]:
    found, stats = {os.getpid()}, dict(_stats())
    size = 0
    while size != len(found):
        size = len(found)
        found.update(pid for pid, (parent, _, _) in stats.items() if parent in found)
    return {pid: stats[pid] for pid in found if pid in stats and pid != os.getpid()}


def _usage() -> tuple[int, int]:
    below = _descendants().values()
    return sum(threads for _, threads, _ in below), sum(resident for _, _, resident in below)


def _oom_kills() -> int:
    """Return how often the kernel has killed a process of this container for its memory."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return int(dict(line.split() for line in file)["oom_kill"])
    return 0


class _Counted:
    """A file that counts what is written."""

    def __init__(self, file: Any) -> None:
        self._file, self.count = file, 0

    def write(self, data: bytes) -> int:
        self.count += len(data)
        written: int = self._file.write(data)
        return written


def _pack(folder: str, file: Any, limits: dict[str, Any]) -> str:
    """Write the files, links and folders of a folder as a tar archive; return why it cannot be read, if it cannot.

    Links that lead out of it, pipes and devices are left out.
    """
    room, count = limits["scratch_mib"] * 2**20, 0
    if not os.path.isdir(folder):
        return "it is not a folder"
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for parent, folders, names in os.walk(folder):
            folders[:] = sorted(set(folders) - set(_LEFT_OUT))
            below = os.path.relpath(parent, folder)
            for name in [*folders, *sorted(names)]:
                full = os.path.join(parent, name)
                path = posixpath.normpath(posixpath.join(below, name))
                status, info = os.lstat(full), tarfile.TarInfo(path)
                count += 1
                if len(path) > _MAX_PATH or count > _MAX_ENTRIES:
                    return f"it has more than {_MAX_ENTRIES} files, or paths of more than {_MAX_PATH} characters"
                info.mode = status.st_mode & 0o777
                if stat.S_ISDIR(status.st_mode):
                    info.type = tarfile.DIRTYPE
                    archive.addfile(info)
                elif stat.S_ISLNK(status.st_mode):
                    info.type, info.linkname = tarfile.SYMTYPE, os.readlink(full)
                    reached = posixpath.normpath(posixpath.join(posixpath.dirname(path), info.linkname))
                    if not info.linkname.startswith("/") and reached != ".." and not reached.startswith("../"):
                        archive.addfile(info)
                elif stat.S_ISREG(status.st_mode):
                    room -= status.st_size
                    if room < 0:
                        return f"its files have more than {limits['scratch_mib'] * 2**20} bytes"
                    info.size = status.st_size
                    try:
                        with open(full, "rb") as content:
                            archive.addfile(info, content)
                    except OSError as error:
                        return f"{path} cannot be read: {error.strerror}"
    return ""


def _relay_port(port: int) -> socket.socket | None:
    """Return the listening port by which a program reaches its address; None if it has none."""
    if not port:
        return None
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(32)
    return listening


def _serve(listening: socket.socket, path: str) -> None:
    while True:
        near, _ = listening.accept()
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=_pipe, args=ends, daemon=True).start()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    try:
        while True:
            chunk = source.recv(2**16)
            if not chunk:
                break
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
