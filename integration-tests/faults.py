"""Faults that are done to runs: processes that are killed or stopped, and machines that lack or refuse something."""

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import Run

from rl_launch.cli.failure import UNFINISHED

DRIVER = "the driver"
EVERYTHING = "all its processes"
KEEPER = "rl_launch.cluster.node_keeper"
RAYLET = "raylet/raylet"
GCS = "gcs_server"
DASHBOARD_AGENT = "ray::DashboardAgent"
RUNTIME_ENV_AGENT = "ray::RuntimeEnvAgent"
RANK = "ray::WorkerHost"
ROLLOUT_WORKER = "ray::AsyncWorkerHost"
ENVIRONMENT_HOST = "ray::RestartingHost"
ENVIRONMENT_PROCESS = "environments.process"
SANDBOX = "rl_envs.sandbox.zygote"
ENGINE = "VLLM::EngineCore"

OUT_OF_MEMORY = "a full control group"
KILL, STOP, TERMINATE = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM

FAULT = "fault"
"""Name of the property of a test that is a row of the table of faults."""

FAILED = 1
"""Exit code of a run that an error ended."""

WRONG_USE = 2
"""Exit code of a run that cannot start before its user does something."""

NONE = r"(?!)"
"""A pattern for faults that need no word."""

Machine = Callable[[Path], tuple[str, ...]]
"""Makes what a command needs to run on a poorer machine, in a folder; returns the words to put in front of it."""


@dataclass(frozen=True)
class Fault:
    """A fault of one process of a run.

    Args:
        run: Kind of run: `sft`, `grpo`, `agents` or `engines`, which is `grpo` with vLLM.
        sign: Signal that does it.
        victim: Words of the name or the command line of the process.
        says: Pattern of the line in which the run names the fault.
        code: Exit code of the run that it is done to; 0 if the run continues.
        is_exact: False if rollouts that fail by it may change what is learned.
    """

    run: str
    sign: signal.Signals | str
    victim: str
    says: str
    code: int = 0
    is_exact: bool = True

    def __str__(self) -> str:
        sign = self.sign.name if isinstance(self.sign, signal.Signals) else self.sign
        return f"{self.run}, {sign} of {self.victim.rpartition('/')[2].removeprefix('ray::')}"

    def strike(self, run: Run) -> None:
        """Do it to a run."""
        if self.sign == OUT_OF_MEMORY:
            # whatever it still allocates is too much, be it a page
            is_old = Path("/sys/fs/cgroup/memory").exists()
            group = control_group("memory", "memory.limit_in_bytes" if is_old else "memory.max", "4096")
            (group / "cgroup.procs").write_text(str(run.find(self.victim).pid))
        elif self.victim == DRIVER:
            run.process.send_signal(self.sign)
        elif self.victim == EVERYTHING:
            run.kill_all()
        else:
            run.signal_one(self.victim, self.sign)


RAY_ENDED = r"Ray's node process \(raylet\), process \d+, ended|the parent of Ray's processes .* ended"
RAY_STOPPED = r"Ray's node process \(raylet\), process \d+, is stopped"
RESTARTS = "restarting from (checkpoint step_|the beginning)"
RESTARTED = r"restart\(s\) of its processes"
REPLACED = "replacing it|was interrupted"

FAULTS = [
    *(
        fault
        for run in ("sft", "grpo", "agents")
        for fault in (
            Fault(run, KILL, RAYLET, RAY_ENDED, UNFINISHED),
            Fault(run, KILL, KEEPER, RAY_ENDED, UNFINISHED),
            Fault(run, STOP, KEEPER, "node_keeper.*is stopped"),
            Fault(run, KILL, GCS, "gcs_server.*ended; the run saves and ends", UNFINISHED),
            Fault(run, STOP, GCS, "gcs_server.*is stopped"),
            Fault(run, KILL, RANK, RESTARTS),
            Fault(run, STOP, RANK, RESTARTS),
            Fault(run, KILL, DRIVER, NONE, -KILL),
            Fault(run, TERMINATE, DRIVER, "SIGTERM: the run ends after this step", UNFINISHED),
            Fault(run, KILL, EVERYTHING, NONE, -KILL),
        )
    ),
    *(
        fault
        for run in ("grpo", "agents")
        for fault in (
            # SFT sends nothing through it, and may be finished by the time that it is given up
            Fault(run, STOP, RAYLET, RAY_STOPPED, UNFINISHED),
            Fault(run, KILL, ROLLOUT_WORKER, REPLACED),
            Fault(run, STOP, ROLLOUT_WORKER, REPLACED),
            Fault(run, KILL, ENVIRONMENT_HOST, NONE),
            Fault(run, STOP, ENVIRONMENT_HOST, "its host has not answered for"),
            Fault(run, KILL, ENVIRONMENT_PROCESS, RESTARTED, is_exact=False),
            Fault(run, STOP, ENVIRONMENT_PROCESS, RESTARTED, is_exact=False),
        )
    ),
    Fault("engines", KILL, ENGINE, REPLACED),
    Fault("engines", STOP, ENGINE, REPLACED),
    Fault("sft", OUT_OF_MEMORY, RANK, RESTARTS),
    Fault("grpo", OUT_OF_MEMORY, ROLLOUT_WORKER, REPLACED),
    Fault("agents", OUT_OF_MEMORY, ENVIRONMENT_PROCESS, RESTARTED, is_exact=False),
    # the raylet ends with its agents
    Fault("sft", KILL, DASHBOARD_AGENT, RAY_ENDED, UNFINISHED),
    Fault("sft", STOP, DASHBOARD_AGENT, NONE),
    Fault("sft", KILL, RUNTIME_ENV_AGENT, RAY_ENDED, UNFINISHED),
    Fault("sft", STOP, RUNTIME_ENV_AGENT, NONE),
    Fault("agents", KILL, SANDBOX, NONE, is_exact=False),
    Fault("agents", STOP, SANDBOX, NONE, is_exact=False),
]


@dataclass(frozen=True)
class Lack:
    """A machine that lacks or refuses something.

    Args:
        run: Kind of run.
        name: What it lacks.
        machine: Makes the machine.
        says: Pattern of the line in which the run names it.
        code: Exit code of the run there; 0 if it is trained to its end.
        begins: Whether the run makes steps first; a file that `machine` knows then begins the fault.
    """

    run: str
    name: str
    machine: Machine
    says: str
    code: int = 0
    begins: bool = False

    def __str__(self) -> str:
        return f"{self.run}, {self.name}"


def few_descriptors(folder: Path) -> tuple[str, ...]:
    """At most 256 open files in a process."""
    return ("prlimit", "--nofile=256:256")


def small_shared_memory(folder: Path) -> tuple[str, ...]:
    """16 MiB of shared memory, in a mount namespace that only the run has."""
    script = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


def few_processes(folder: Path) -> tuple[str, ...]:
    """A control group with 120 processes and threads."""
    script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    return ("sh", "-c", script, str(control_group("pids", "pids.max", "120")))


def control_group(controller: str, file: str, value: str) -> Path:
    """Return a new control group with a limit."""
    root = Path("/sys/fs/cgroup") / controller
    root = root if root.exists() else root.parent
    group = root / f"rl-fault-{os.getpid()}-{time.monotonic_ns()}"
    try:
        (root / "cgroup.procs").read_text()
        group.mkdir()
        (group / file).write_text(value)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    return group


REFUSING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/time.h>
#include <time.h>
#include <sys/uio.h>
#include <unistd.h>

static int jumps(void) {
    const char *when = getenv("JUMPS_WHEN");
    int before = errno, found = when && !access(when, F_OK);
    errno = before;
    return found;
}
static int refuses(int fd) {
    char link[64], path[PATH_MAX];
    const char *below = getenv("REFUSED"), *when = getenv("REFUSED_WHEN"), *number = getenv("REFUSED_ERRNO");
    if (!below || !number || (when && access(when, F_OK))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, below, strlen(below))) return 0;
    errno = atoi(number);
    return 1;
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
ssize_t write(int fd, const void *data, size_t size) { return refuses(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *data, int n) { return refuses(fd) ? -1 : REAL(writev)(fd, data, n); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return refuses(fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int fsync(int fd) { return refuses(fd) ? -1 : REAL(fsync)(fd); }
int flock(int fd, int operation) {
    if (!getenv("NO_LOCKS")) return REAL(flock)(fd, operation);
    errno = ENOLCK;
    return -1;
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int result = REAL(clock_gettime)(id, now);
    if (id == CLOCK_REALTIME && jumps()) now->tv_sec += atoi(getenv("JUMP_S"));
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (jumps()) now->tv_sec += atoi(getenv("JUMP_S"));
    return result;
}
"""
"""A library that refuses what a program does with files below a folder, and one whose clock jumps."""


def refusing(number: int) -> Machine:
    """A disk that refuses all writes below the run directory with an error, once the file `broken` is there."""

    def machine(folder: Path) -> tuple[str, ...]:
        broken = folder.parent / "broken"
        return _with_library(folder, f"REFUSED={folder}/", f"REFUSED_WHEN={broken}", f"REFUSED_ERRNO={number}")

    return machine


def jumping(seconds: int) -> Machine:
    """A clock that jumps for all processes of the run, once the file `broken` is there."""

    def machine(folder: Path) -> tuple[str, ...]:
        return _with_library(folder, f"JUMPS_WHEN={folder.parent / 'broken'}", f"JUMP_S={seconds}")

    return machine


def without_locks(folder: Path) -> tuple[str, ...]:
    """A file system without locks."""
    return _with_library(folder, "NO_LOCKS=1")


def _with_library(folder: Path, *settings: str) -> tuple[str, ...]:
    library = folder.parent / "refusing.so"
    if not library.exists():
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        try:
            subprocess.run(command, input=REFUSING, text=True, check=True)
        except FileNotFoundError:
            pytest.skip("no C compiler")
    return ("env", f"LD_PRELOAD={library}", *settings)


LACKS = [
    *(Lack(run, "256 open files", few_descriptors, NONE) for run in ("sft", "grpo", "agents")),
    *(Lack(run, "16 MiB of /dev/shm", small_shared_memory, NONE) for run in ("sft", "grpo", "agents")),
    Lack("sft", "no file locks", without_locks, NONE),
    *(
        Lack(run, f"the clock jumps by {seconds} s", jumping(seconds), NONE, begins=True)
        for run, seconds in (("sft", 7200), ("grpo", 7200), ("grpo", -7200), ("agents", -7200))
    ),
    *(
        Lack(run, f"writes end in {errno.errorcode[number]}", refusing(number), f"error: {words}", FAILED, begins=True)
        for run, number, words in (
            ("sft", errno.ENOSPC, "no space left on a disk"),
            ("grpo", errno.EDQUOT, "a disk quota is exceeded"),
            ("agents", errno.EROFS, "a file system is read-only"),
            ("sft", errno.EIO, "a disk failed to read or write"),
            ("grpo", errno.ENOSPC, "no space left on a disk"),
        )
    ),
    Lack("sft", "120 processes", few_processes, "pids.max allows 120", WRONG_USE),
]


def noticed(run: Run, says: str, timeout: float = 600) -> tuple[float, str]:
    """Wait until a run names a fault, or ends.

    Returns:
        Seconds that it took, and the line; empty if it ended without it.
    """
    began = time.monotonic()
    while True:
        has_ended = run.process.poll() is not None
        found = re.search(f"^.*(?:{says}).*$", run.output, re.MULTILINE)
        if found or has_ended:
            return time.monotonic() - began, found.group() if found else ""
        assert time.monotonic() < began + timeout, run.output
        time.sleep(0.1)
