"""Programs that abuse their sandbox, each by one way: `python -m rl_envs.sandbox.abuses` shows which are contained.

Programs of root may have their own user ids, so that the kernel refuses them much whatever the sandbox does. Started as
root, the module therefore tries everything a second time as a user without privileges, whose programs share their user
id with the victims. Each table shows the user ids.

Each program also has its own bounds, so that none harms a machine that does not contain it: a fork bomb ends after a
hundred processes, and signals are only tried.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from rl_core.errors import RLError
from rl_envs.sandbox.confinement import enter_namespaces, first_user_id, mapped_ids
from rl_envs.sandbox.kernel import syscalls
from rl_envs.sandbox.program import Ending, Isolation, Limits, Outcome, Program
from rl_envs.sandbox.sandbox import Sandbox
from rl_envs.sandbox.scratch import abandoned, temporary_folder

LIMITS = Limits(cpu_s=10.0, wall_s=60.0, memory_mib=256, scratch_mib=8, processes=8, output_kib=64)
"""Limits of a program whose abuse is not about time."""
BRIEF = Limits(cpu_s=1.0, wall_s=4.0, memory_mib=256, scratch_mib=8, processes=8, output_kib=64)
"""Limits of a program that would compute without end."""
ASLEEP = Limits(cpu_s=10.0, wall_s=1.0, memory_mib=256, scratch_mib=8, processes=8, output_kib=64)
"""Limits of a program that would sleep without end."""

SECRET = "a secret of the machine"

_libc = ctypes.CDLL(None, use_errno=True)

_PRELUDE = f"""
import ctypes, errno, fcntl, json, mmap, os, resource, select, signal, socket, struct, sys, threading, time
from contextlib import suppress
bait = json.load(sys.stdin)
SECRET = {SECRET!r}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_ssize_t

def breach(how):
    print("BREACH", how, flush=True)

def refused(function, *arguments):
    try:
        result = function(*arguments)
    except (OSError, ValueError, ImportError, MemoryError, RuntimeError):
        return True
    return isinstance(result, int) and result < 0

def call(*numbers):
    # The first number has an entry for x86_64 and one for aarch64.
    number = numbers[0][os.uname().machine == "aarch64"]
    return libc.syscall(ctypes.c_long(number), *numbers[1:])

def must_fail(function, *arguments):
    if not refused(function, *arguments):
        breach(getattr(function, "__name__", "call"))

def must_be_denied(function, *arguments):
    # by the sandbox, whatever the state of the machine
    try:
        result = function(*arguments)
        number = ctypes.get_errno() if isinstance(result, int) and result < 0 else 0
    except OSError as error:
        number = error.errno
    if number not in (errno.EPERM, errno.ENOSYS, errno.ENOTTY):
        breach(f"error {{number}}")

def mapped(address, size, protection, flags):
    result = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags, -1, ctypes.c_long(0))
    return min(result, 0)

def hold_in_children(hold, count=5):
    # each child calls `hold(ready)`, calls `ready` when it holds something, and stays
    near, far = os.pipe()
    num_started = 0
    for _ in range(count):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            try:
                kept = hold(lambda: os.write(far, b"x"))
                time.sleep(20)
            finally:
                os._exit(1)
        num_started += 1
    os.close(far)
    holding = 0
    while holding < num_started and select.select([near], [], [], 10)[0] and os.read(near, 1):
        holding += 1
    if holding:
        time.sleep(2)
        breach(f"{{holding}} processes hold it")
"""

_TRIED = "tried everything"
NAME_WIDTH = 52
"""Width of the first column of the printed table."""
USER = "user id of the program"
"""Name of the row that shows the user of the programs of each level."""
NOT_OFFERED, CONTAINED, BREACHED = "not offered", "contained", "-"
"""Entry of a level that the machine does not offer, of an abuse that is contained, and of one that is not."""
_STAGE = "/mnt"


@dataclass(frozen=True)
class Abuse:
    """A program that tries to leave its sandbox, or to take more than its share.

    Args:
        name: The way out, in words.
        source: The program, after a prelude that offers `breach`, `must_fail`, `call` and `bait`.
        limits: Limits to run it with.
        endings: Its possible endings if it is contained; for `exit` it must have come to its end.
        exit_code: Exit code of its own end; None if it comes to the end of its source.
    """

    name: str
    source: str
    limits: Limits = LIMITS
    endings: tuple[Ending, ...] = ("exit",)
    exit_code: int | None = None

    def program(self, given: Mapping[str, Any]) -> Program:
        """Return the program, with the bait of this machine."""
        source = f"{_PRELUDE}\n{self.source.strip()}\nprint({_TRIED!r}, flush=True)\n"
        return Program(source, stdin=json.dumps(given).encode())

    def breaches(self, outcome: Outcome) -> str:
        """Return its ways out, or why its end shows nothing; empty if it is contained."""
        lines = outcome.stdout.decode(errors="replace").splitlines()
        found = [line.removeprefix("BREACH ") for line in lines if line.startswith("BREACH ")]
        if found:
            return "; ".join(found)
        if outcome.ending not in self.endings:
            return f"it came to the ending {outcome.ending}: {outcome.last_words}"
        if self.exit_code is not None and outcome.exit_code != self.exit_code:
            return f"it ended itself with {self.exit_code}, but {outcome.exit_code} was reported"
        if outcome.ending == "exit" and self.exit_code is None and _TRIED not in lines:
            return f"it did not try everything: {outcome.last_words}"
        return ""


_PROGRAMS = r"""
## network
=== connect to a TCP port
must_fail(socket.create_connection, ("127.0.0.1", bait["tcp"]), 5)
=== send a UDP packet
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(b"x", ("127.0.0.1", bait["udp"]))
must_fail(send)
=== listen on a port
must_fail(socket.create_server, ("127.0.0.1", 0))
=== connect over IPv6
must_fail(socket.create_connection, ("::1", bait["tcp"]), 5)
=== resolve a name
must_fail(socket.create_connection, ("localhost", bait["tcp"]), 5)
=== open a raw or a packet socket
must_fail(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
=== talk to the kernel by netlink
must_fail(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)
=== connect to a Unix socket by its path
def connect():
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(bait["unix"])
must_fail(connect)
=== connect to an abstract Unix socket
def connect():
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(chr(0) + bait["abstract"])
must_fail(connect)
=== point a pair of datagram sockets elsewhere
def redirect():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    near.connect(bait["datagrams"])
must_fail(redirect)

## files
=== read a file that everybody may read
must_fail(open, bait["file"])
=== read the users of the machine
must_fail(open, "/etc/passwd")
=== read the passwords of the machine
must_fail(open, "/etc/shadow")
=== list a folder outside
must_fail(os.listdir, os.path.dirname(bait["file"]))
=== read the file of another run
must_fail(open, bait["other_run"])
=== write beside a file outside
must_fail(open, bait["file"] + ".new", "w")
=== change a file outside
must_fail(open, bait["file"], "a")
=== leave by a symbolic link
os.symlink(bait["file"], "link")
must_fail(open, "link", "a")
os.symlink(os.path.dirname(bait["file"]), "folder")
must_fail(open, "folder/through-a-link", "w")
=== leave by a hard link
must_fail(os.link, bait["file"], "link")
=== leave by parent folders
must_fail(open, "../" * 20 + bait["file"].lstrip("/"))
=== remove or rename a file outside
must_fail(os.unlink, bait["spare"])
=== change the mode of a file outside
must_fail(os.chmod, bait["file"], 0o666)
=== change Python's library
must_fail(open, os.path.join(os.path.dirname(os.__file__), "bait.py"), "w")
=== open the machine's devices
for device in ("/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/tty", "/dev/sda", "/dev/vda", "/dev/nvidia0"):
    must_fail(open, device, "rb")
=== make a device
must_fail(os.mknod, "device", 0o020666, os.makedev(1, 3))

## secrets
=== read secrets in environment variables
SECRET in " ".join(os.environ.values()) and breach("its own environment has a secret")
=== read the environment of other processes
for pid in ("self", "1", os.getppid(), bait["pid"]):
    with suppress(OSError):
        if SECRET.encode() in open(f"/proc/{pid}/environ", "rb").read():
            breach(f"the environment of process {pid}")
=== read the memory of other processes
must_fail(open, f"/proc/{bait['pid']}/mem", "rb")
=== use inherited descriptors
for descriptor in range(3, 64):
    if not refused(os.fstat, descriptor):
        breach(f"descriptor {descriptor} is open")

## processes of others
=== send a signal to a process
must_fail(os.kill, bait["pid"], 0)
=== send a signal to its parents
os.getppid() > 1 and must_fail(os.kill, os.getppid(), 0)
=== trace another process
must_fail(lambda: libc.ptrace(ctypes.c_long(0x4206), ctypes.c_long(bait["pid"]), None, None))
=== read another process's memory by a system call
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
remote = (ctypes.c_size_t * 2)(bait["address"], 8)
must_fail(lambda: libc.process_vm_readv(bait["pid"], vector, 1, remote, 1, 0))
=== limit another process
must_fail(resource.prlimit, bait["pid"], resource.RLIMIT_CORE, (0, 0))
=== change the priority of all processes of the user
# by default all processes of a user have this priority; root's do not: the kernel's threads are among them
if os.getuid() == bait["uid"] != 0 and not refused(os.getpriority, os.PRIO_PROCESS, bait["pid"]):
    must_fail(os.setpriority, os.PRIO_USER, 0, 0)
=== change the priority of another process
must_fail(os.setpriority, os.PRIO_PROCESS, bait["pid"], 19)
must_fail(os.setpriority, os.PRIO_PGRP, bait["pid"], 19)
must_fail(lambda: call((251, 30), 1, bait["pid"], 3 << 13))  # ioprio_set: idle
=== choose the processors of another process
must_fail(os.sched_setaffinity, bait["pid"], {min(os.sched_getaffinity(0))})
=== choose the scheduler of another process
idle, attributes = 5, struct.pack("IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0)
must_fail(os.sched_setscheduler, bait["pid"], idle, os.sched_param(0))
must_fail(os.sched_setparam, bait["pid"], os.sched_param(0))
must_fail(lambda: call((314, 274), bait["pid"], attributes, 0))
=== share a core's schedule with another process
must_fail(lambda: libc.prctl(62, ctypes.c_ulong(2), ctypes.c_ulong(bait['pid']), ctypes.c_ulong(0), None))
=== signal a process by a descriptor of it
def signal_by_descriptor():
    descriptor = os.pidfd_open(bait["pid"])
    signal.pidfd_send_signal(descriptor, 0)
must_fail(signal_by_descriptor)
=== remove shared memory or a queue of another process
must_fail(lambda: call((31, 195), bait["shm"], 0, None))
must_fail(lambda: call((241, 181), bait["queue"].encode()))
=== hold a lease on a file
with open("leased", "w") as file:
    must_fail(fcntl.fcntl, file, fcntl.F_SETLEASE, fcntl.F_WRLCK)

## privileges
=== become root
os.getuid() and must_fail(os.setuid, 0)
=== make a user namespace
must_fail(lambda: libc.unshare(0x10000000))
=== make a namespace by clone
must_fail(lambda: call((56, 220), ctypes.c_long(0x10000011), 0, 0, 0, 0))
=== mount a filesystem
must_fail(lambda: libc.mount(b"x", os.getcwd().encode(), b"tmpfs", 0, None))
=== change the root
must_fail(os.chroot, '.')
=== change the kernel's handler of core files
must_fail(open, "/proc/sys/kernel/core_pattern", "a")
=== execute another program
must_fail(os.posix_spawn, "/bin/sh", ["sh", "-c", "exit 0"], {})
=== reach seldom-tested parts of the kernel
must_fail(lambda: call((425, 425), 1, ctypes.create_string_buffer(256)))  # io_uring
must_fail(lambda: call((250, 219), 0, -3, 1))                              # keyctl
must_fail(lambda: call((321, 280), 0, ctypes.create_string_buffer(128), 128))  # bpf
must_fail(lambda: call((298, 241), ctypes.create_string_buffer(128), 0, -1, -1, 0))  # perf
must_fail(lambda: call((323, 282), 1))                                     # userfaultfd
=== change the clock or the name of the machine
must_fail(socket.sethostname, socket.gethostname() or "x")

## exhaustion
=== a fork bomb
children = []
while len(children) < 100:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        signal.pause()
    children.append(pid)
if len(children) > 16:
    breach(f"it started {len(children)} processes")
for pid in children:
    os.kill(pid, signal.SIGKILL)
=== a bomb of threads -> exit, processes
threading.stack_size(2**20)
over, started = threading.Event(), 0
try:
    while started < 200:
        threading.Thread(target=over.wait, daemon=True).start()
        started += 1
    time.sleep(2)
    breach("it has 200 threads")
except RuntimeError:
    over.set()
=== a memory bomb -> exit, memory
kept = []
with suppress(MemoryError):
    while len(kept) < 64:
        kept.append(bytearray(2**24))
if len(kept) > 16:
    breach(f"it has {len(kept) * 16} MiB")
=== the memory of many processes -> exit, memory
def hold(ready):
    kept = bytearray(b"x") * (150 * 2**20)
    ready()
    return kept
hold_in_children(hold)
=== the memory of processes that hide -> exit, memory, processes
def hold(ready):
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: /proc may show it to root only
    def fill():
        time.sleep(0.2)
        kept = bytearray(b"x") * (150 * 2**20)
        ready()
        time.sleep(20)
    threading.Thread(target=fill).start()
    call((60, 93), 0)  # exit, of this thread
hold_in_children(hold)
=== shared memory that is not resident -> exit, memory
def hold(ready):
    shared = mmap.mmap(-1, 180 * 2**20)
    for start in range(0, len(shared), 2**20):
        shared[start : start + 2**20] = b"x" * 2**20
        shared.madvise(mmap.MADV_DONTNEED, start, 2**20)
    ready()
    return shared
hold_in_children(hold)
must_be_denied(mapped, None, 4096, 3, 0x21)
must_fail(lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096))
=== memory of page tables -> memory
# one page for each of them, 2**30 bytes apart: private, anonymous, at a fixed address, and only read
for address in range(2**40, 40_000 * 2**30 + 2**40, 2**30):
    mapped(address, 4096, 1, 0x32) or ctypes.string_at(address, 1)
time.sleep(2)
=== huge pages of a pool, or given up in part
must_be_denied(mapped, None, 2**21, 3, 0x40022)
libc.prctl(42, 0, 0, 0, 0) == 1 or breach("it has huge pages")
must_be_denied(libc.prctl, 41, 0, 0, 0, 0)
=== pages that cannot be swapped out, or are compared
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)
must_be_denied(libc.mlockall, 1)
must_fail(mapped, None, 4096, 3, 0x2022)
must_be_denied(page.madvise, 12)
must_be_denied(libc.prctl, 67, 1, 0, 0, 0)
=== larger buffers of pipes and sockets
must_be_denied(fcntl.fcntl, os.pipe()[1], 1031, 2**20)
end = socket.socketpair()[0]
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
    before = end.getsockopt(socket.SOL_SOCKET, option)
    end.setsockopt(socket.SOL_SOCKET, option, 2**26)
    end.getsockopt(socket.SOL_SOCKET, option) == before or breach("it enlarged a buffer")
=== what waits in sockets -> exit, memory
def hold(ready):
    pairs = [socket.socketpair() for _ in range(29)]
    for end in (end for pair in pairs for end in pair):
        end.setblocking(False)
        while not refused(lambda: end.send(b"x" * 2**16) * 0):
            pass
    ready()
    return pairs
hold_in_children(hold, 10)
=== pages that stay in pipes and sockets
near, far = os.pipe()
file = os.open("file", os.O_RDWR | os.O_CREAT)
must_be_denied(os.sendfile, far, file, 0, 1)
for number in ((275, 76), (276, 77), (278, 75)):  # splice, tee, vmsplice
    must_be_denied(lambda: call(number, near, far, None, None, 1, 0))
=== descriptors that are on their way
near, far = socket.socketpair()
with suppress(OSError):
    for _ in range(50):
        socket.send_fds(near, [b"x"], [0] * 40)
    breach("it sent 2000 descriptors")
=== locks of records without end -> memory
with open("locked", "w") as file:
    for number in range(3000):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * number)
    time.sleep(2)
=== signals that wait, and timers, without end
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
sent = sum(libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0 for _ in range(1000))
timer = ctypes.c_void_p()
made = sum(call((222, 107), 1, None, ctypes.byref(timer)) == 0 for _ in range(1000))
if sent + made > 100:
    breach(f"{sent} signals and {made} timers")
=== memory that belongs to no process
must_fail(lambda: os.memfd_create("m"))
must_fail(lambda: call((29, 194), 0, 2**20, 0o1600))
must_fail(open, "/dev/shm/m", "w")
=== fill the disk by one file
with suppress(OSError):
    with open("big", "wb") as file:
        for _ in range(64):
            file.write(bytes(2**20))
    breach("it wrote 64 MiB")
=== fill the disk by many files
with suppress(OSError):
    for number in range(64):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(2**20))
    breach("it wrote 64 MiB")
=== make files without end
with suppress(OSError):
    for number in range(5000):
        open(f"file{number}", "w").close()
    breach("it made 5000 files")
=== flood stdout -> output
while True: os.write(1, b"x" * 65536)
=== flood stderr -> output
while True: os.write(2, b"x" * 65536)
=== open descriptors without end
pipes = []
with suppress(OSError):
    while len(pipes) < 1000:
        pipes.append(os.pipe())
    breach("it opened 2000 descriptors")
=== an endless loop -> cpu, deadline
while True: pass
=== sleep without end -> deadline
time.sleep(10**6)
=== ignore every signal, in an endless loop -> signal, deadline
for number in range(1, 65):
    with suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_IGN)
while True: pass
=== crash the interpreter -> signal
ctypes.string_at(0)
=== raise its own limits
for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    must_fail(resource.setrlimit, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

## what belongs to the machine, or to all processes of a user
=== contexts of asynchronous input, instances of inotify
must_be_denied(lambda: call((206, 0), 60_000, bytes(8)))
must_be_denied(lambda: call((294, 26), 0))
=== flush the machine's disks or drop its cached files
must_be_denied(lambda: call((162, 81)))
# no such file: only the kernel would find out
for number in ((306, 267), (74, 82), (75, 83), (277, 84), (221, 223)):
    call(number, 999, 0, 0, 4) and breach(f"call {number}")
=== lock files of Python's library
with open(os.__file__) as file:
    for operation in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        must_be_denied(fcntl.flock, file, operation | fcntl.LOCK_NB)
    must_be_denied(fcntl.fcntl, file, 37, bytes(32))  # F_OFD_SETLK
    must_fail(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
=== rules without end, or a core for itself
must_be_denied(lambda: call((444, 444), None, 0, 1))  # of Landlock
must_be_denied(libc.prctl, 22, 2, 0, 0, 0)  # of seccomp
must_be_denied(libc.prctl, 62, 1, 0, 0, 0)  # PR_SCHED_CORE
=== a larger share of the processors and disks
must_fail(os.setpriority, os.PRIO_PROCESS, 0, -1)
must_fail(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
must_fail(lambda: call((251, 30), 1, 0, 1 << 13))  # ioprio_set: real time
=== requests to filesystems and networks
with open("file", "w") as file:
    for request in (0x80086601, 0xC0045877, 0x8008660F, 0x8912, 0x5412):
        must_be_denied(fcntl.ioctl, file, request, bytes(64))

## what the sandbox reports
=== end its parents
os.getppid() > 1 and must_fail(os.kill, os.getppid(), signal.SIGKILL)
must_fail(lambda: call((234, 131), os.getppid() or 1, os.getppid() or 1, signal.SIGKILL))  # tgkill
=== forge the sandbox's report
report = struct.pack("!I", 2**31) + b'{"ending": "exit", "exit_code": 0, "parts": []}'
for descriptor in range(3, 256):
    for data in (report, struct.pack("=i", 0), struct.pack("=i", -1) + b"x"):
        with suppress(OSError):
            os.write(descriptor, data)
            breach(f"descriptor {descriptor} can be written")
os.write(1, report)
os.write(2, report)
os._exit(7)
=== forge the sandbox's report and crash -> signal
os.write(1, b'{"ending": "exit", "exit_code": 0, "parts": []}'); os.abort()
=== flood stdout from many threads, and close it -> output
def flood():
    while True:
        os.write(1, b"x" * 65536)
for _ in range(4):
    threading.Thread(target=flood, daemon=True).start()
time.sleep(0.2)
os.close(1)
flood()
=== close its streams and stay -> deadline
for descriptor in range(3): os.close(descriptor)
time.sleep(10**6)

## leftovers
=== outlive a crash of the sandbox
os.getppid() > 1 and must_be_denied(libc.prctl, 1, 0, 0, 0, 0)
=== leave folders without end
for _ in range(3000):
    if refused(os.mkdir, "d"):
        break
    os.chdir("d")
=== leave folders that its user may not read or write
for mode in (0o300, 0o700):
    for folder in (f"{mode}", f"{mode}/0", f"{mode}/1"):
        os.mkdir(folder, mode if "/" not in folder else int(folder[-1]) * 0o400)
    open(f"{mode}/file", "w").close()
=== leave names and links that mislead the removal
for name in (b"\xff", b"a\nb", b"-rf", b"0", b"files", b"x" * 255):
    os.makedirs(name + b"/" + name)
for name in ("0/link", "1", "files/link"):
    os.symlink(os.path.dirname(bait["file"]), name)
=== leave a process behind
with suppress(OSError):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(60)
        os._exit(0)
    os.wait()
=== hold its output open after its end
with suppress(OSError):
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
"""

_FURTHER: dict[str, dict[str, Any]] = {
    "what waits in sockets": {"limits": replace(LIMITS, memory_mib=224)},
    "an endless loop": {"limits": BRIEF},
    "sleep without end": {"limits": ASLEEP},
    "ignore every signal, in an endless loop": {"limits": BRIEF},
    "forge the sandbox's report": {"exit_code": 7},
    "close its streams and stay": {"limits": ASLEEP},
}


def _abuses() -> Iterator[Abuse]:
    """Yield the abuses in `_PROGRAMS`: a line `=== name -> endings`, without endings for `exit`, and the program."""
    for part in _PROGRAMS.split("\n=== ")[1:]:
        head, _, source = part.partition("\n")
        name, _, stated = head.partition(" -> ")
        endings = cast("tuple[Ending, ...]", tuple(stated.split(", ") if stated else ["exit"]))
        yield Abuse(name, source, endings=endings, **_FURTHER.get(name, {}))


ABUSES = tuple(_abuses())
"""One program for each way."""


@contextlib.contextmanager
def bait() -> Iterator[dict[str, Any]]:
    """Enter a context with the targets of the programs: files, sockets and a process with a secret."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(temporary_folder(os.getuid())))
        folder.chmod(0o777)
        other = folder / "other-run"
        other.mkdir(mode=0o755)
        for file in (folder / "bait", folder / "spare", other / "answer"):
            file.write_text(SECRET)
            file.chmod(0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        unix, abstract, datagrams = (
            stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            for kind in (socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_DGRAM)
        )
        name = f"rl-sandbox-{os.getpid()}"
        addresses = ((unix, str(folder / "unix")), (abstract, f"\0{name}"), (datagrams, str(folder / "dgram")))
        for sock, address in addresses:
            sock.bind(address)
        for path in (folder / "unix", folder / "dgram"):
            path.chmod(0o777)
        unix.listen()
        abstract.listen()
        command = [sys.executable, "-S", "-c", "import sys; print(id(sys), flush=True); sys.stdin.read()"]
        pipe = subprocess.PIPE
        victim = stack.enter_context(subprocess.Popen(command, env={"SECRET": SECRET}, stdin=pipe, stdout=pipe))
        assert victim.stdout is not None
        shared = _libc.shmget(ctypes.c_int(0), ctypes.c_size_t(4096), 0o1666)
        stack.callback(_libc.shmctl, shared, 0, None)
        _libc.mq_open(f"/{name}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
        stack.callback(_libc.mq_unlink, f"/{name}".encode())
        yield {
            "file": str(folder / "bait"),
            "spare": str(folder / "spare"),
            "other_run": str(other / "answer"),
            "unix": str(folder / "unix"),
            "datagrams": str(folder / "dgram"),
            "abstract": name,
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "pid": victim.pid,
            "uid": os.getuid(),
            "shm": shared,
            "queue": name,
            "address": int(victim.stdout.readline()),
        }


@contextlib.contextmanager
def opened(isolations: Sequence[Isolation]) -> Iterator[list[Sandbox | None]]:
    """Open a sandbox of each level, None for those that the machine does not offer, which are reported on stderr."""
    with contextlib.ExitStack() as stack:
        sandboxes: list[Sandbox | None] = []
        for isolation in isolations:
            try:
                sandboxes.append(stack.enter_context(Sandbox(isolation)))
            except RLError as error:
                print(error, file=sys.stderr)  # noqa: T201  # the table is the output
                sandboxes.append(None)
        yield sandboxes


def table(sandboxes: Sequence[Sandbox | None]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each row of the table and its entry for each sandbox: first `USER`, then every abuse."""
    users = []
    for sandbox in sandboxes:
        uid = None if sandbox is None else int(sandbox.run(Program("import os; print(os.getuid())")).stdout)
        users.append(NOT_OFFERED if uid is None else f"{uid}, {'ours' if uid == os.getuid() else 'its own'}")
    yield USER, users
    with bait() as given:
        for abuse in ABUSES:
            entries = []
            for sandbox in sandboxes:
                breached = sandbox is not None and attempt(abuse, sandbox, given)
                entries.append(NOT_OFFERED if sandbox is None else BREACHED if breached else CONTAINED)
            yield abuse.name, entries


def attempt(abuse: Abuse, sandbox: Sandbox, given: Mapping[str, Any]) -> str:
    """Return an abuse's ways out, or the files that it left or removed outside; empty if it is contained."""
    before, had_spare = abandoned(), os.path.exists(given["spare"])
    if breaches := abuse.breaches(sandbox.run(abuse.program(given), abuse.limits)):
        return breaches
    # The second look is for another process that may be about to lock its folder.
    if left := (abandoned() - before) & abandoned():
        return f"it left {', '.join(left)}"
    return "files outside were removed" if had_spare and not os.path.exists(given["spare"]) else ""


def main() -> None:
    """Print the table of all levels, or of the given ones; as root also the table of a user without privileges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("isolations", nargs="*", default=get_args(Isolation), help="namespaces, landlock, limits")
    parser.add_argument("--uid", type=int, help="run as this user; needs root (default: as root, then as another user)")
    arguments = parser.parse_args()
    isolations: Sequence[Isolation] = arguments.isolations
    if arguments.uid is not None:
        become(arguments.uid)

    def show(name: str, entries: Iterable[object]) -> None:
        print(f"{name:{NAME_WIDTH}}", *(f"{entry!s:18}" for entry in entries), flush=True)  # noqa: T201  # the output

    print(f"sandboxes and victims of user {os.getuid()}")  # noqa: T201  # It is the output.
    show("abuse", isolations)
    contained = Counter(dict.fromkeys(isolations, 0))
    with opened(isolations) as sandboxes:
        for name, entries in table(sandboxes):
            show(name, entries)
            contained.update(level for level, entry in zip(isolations, entries, strict=True) if entry == CONTAINED)
    show(f"contained of {len(ABUSES)}", (contained[level] for level in isolations))
    if os.getuid() == 0:
        uid = first_user_id(os.getpid(), mapped_ids())
        again = [sys.executable, "-m", "rl_envs.sandbox.abuses", *isolations, "--uid", str(uid)]
        subprocess.run(again, check=True)


def become(uid: int) -> None:
    """Become a user without privileges who can still read Python and its packages; this process must have one thread.

    Folders that only root may enter (`/root` with a Python below it) are covered by empty ones in a namespace of
    mounts. Python and its packages stay in their places there.

    Raises:
        PermissionError: If this process is not root's, or may not mount and the user cannot read Python.
    """
    closed = _closed_folders([sys.base_prefix, sys.prefix, *filter(os.path.isdir, sys.path)])
    if closed:
        enter_namespaces(syscalls.CLONE_NEWNS)
        for folder, wanted in closed.items():
            _open(folder, wanted)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.environ["HOME"] = "/"
    os.chdir("/")


def _closed_folders(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the topmost folders that others may not enter, each with the paths below it."""
    found: dict[str, list[str]] = {}
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        parts = path.split("/")
        for depth in range(2, len(parts) + 1):
            folder = "/".join(parts[:depth])
            if not os.stat(folder).st_mode & 0o001:
                found.setdefault(folder, []).append(path)
                break
    return found


def _open(folder: str, wanted: Sequence[str]) -> None:
    """Cover a folder by one with only these paths below it."""
    outermost = [path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)]
    syscalls.mount("sandbox", _STAGE, "tmpfs", syscalls.MS_NOSUID, "mode=755")
    for index, path in enumerate(outermost):
        os.mkdir(f"{_STAGE}/{index}")
        syscalls.mount(path, f"{_STAGE}/{index}", None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.mount("sandbox", folder, "tmpfs", syscalls.MS_NOSUID, "mode=755")
    for index, path in enumerate(outermost):
        os.makedirs(path, exist_ok=True)
        syscalls.mount(f"{_STAGE}/{index}", path, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.umount(_STAGE)


if __name__ == "__main__":
    main()
