"""The confinement of a program in the process that will run it: privileges, limits, Landlock, system calls and files.

A program sees Python's library, a few devices and its own scratch folder.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from rl_envs.sandbox.kernel import seccomp, syscalls
from rl_envs.sandbox.kernel.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC
from rl_envs.sandbox.processes import ProcessTable
from rl_envs.sandbox.program import Isolation, Limits

FIRST_UID = 1_000_000_000
"""First user id for programs that root starts; each program has its own."""
MAX_SLOTS = 256
"""Maximum number of programs of one sandbox at one time."""

_STACK_BYTES = 64 * 2**20
SCRATCH = "/scratch"
"""A program's current folder, if it has its own root."""
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_DATA = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_STAGES = ("/sys", "/mnt", "/media", "/srv", "/proc", "/home")


@dataclass(frozen=True)
class Confinement:
    """Confinement of the programs of one sandbox.

    Args:
        isolation: Level of isolation.
        user_namespace: True if the namespaces belong to a user without privileges.
        first_uid: User id of the program in the first slot; None if programs keep the id of the sandbox.
        readable: Paths that programs may read.
        executable: Folders among them with commands that programs may execute.
    """

    isolation: Isolation
    user_namespace: bool
    first_uid: int | None
    readable: tuple[str, ...]
    executable: tuple[str, ...] = ()

    @property
    def may_fork(self) -> bool:
        """Return whether programs may start processes: only if their number is limited and none outlives its program.

        The number is not limited for the machine's root, whose programs keep its user id in a user namespace.
        """
        return self.isolation == "limits" or (
            self.isolation == "namespaces" and (self.first_uid is not None or os.getuid() != 0)
        )

    def uid(self, slot: int) -> int:
        """Return the user id of the program in a slot."""
        return os.getuid() if self.first_uid is None else self.first_uid + slot


def first_user_id(owner: int, mapped: Sequence[tuple[int, int]]) -> int:
    """Return the first of `MAX_SLOTS` user ids that no other sandbox of this machine has.

    Args:
        owner: Process id of the sandbox.
        mapped: Ranges of ids that exist here, each its first and their number; a container may have few.
    """
    wanted = FIRST_UID + owner * MAX_SLOTS
    if any(first <= wanted and wanted + MAX_SLOTS <= first + count for first, count in mapped):
        return wanted
    first, count = max(mapped, key=lambda each: each[1])
    # The upper half seldom has other users.
    room = max(1, count // 2 - MAX_SLOTS)
    return first + count // 2 + owner * MAX_SLOTS % room


def mapped_ids() -> list[tuple[int, int]]:
    """Return the ranges of user ids that exist here, each as its first id and their number."""
    try:
        with open("/proc/self/uid_map") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return [(0, 2**32 - 2)]
    return [(int(first), int(count)) for first, _, count in rows]


def confine(confinement: Confinement, limits: Limits, uid: int, scratch: str, port: int = 0) -> None:
    """Confine this process, which must have one thread, for good.

    Args:
        confinement: Confinement of the programs of the sandbox.
        limits: Limits of the program.
        uid: User id of the program.
        scratch: Its scratch folder.
        port: TCP port that it may connect to; 0 for none.
    """
    os.umask(0o077)
    os.chdir(scratch)
    _set_limits(confinement, limits)
    if confinement.isolation != "limits":
        syscalls.drop_bounding_set()
    if confinement.first_uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.die_with_parent()
    if confinement.isolation == "limits":
        return
    syscalls.drop_capabilities()
    syscalls.forbid_new_privileges()
    syscalls.use_small_pages()
    if confinement.isolation == "landlock" or syscalls.landlock_version():
        existing, executes = devices(), bool(confinement.executable)
        readable, writable = [*confinement.readable, *existing], [scratch, *existing[:1]]
        syscalls.restrict_files(readable=readable, writable=writable, executes=executes, port=port)
    seccomp.apply(
        may_fork=confinement.may_fork,
        has_namespaces=confinement.isolation == "namespaces",
        may_connect=bool(port),
        may_execute=bool(confinement.executable),
    )


def _set_limits(confinement: Confinement, limits: Limits) -> None:
    cpu = math.ceil(limits.cpu_s)
    memory, scratch = limits.memory_mib * 2**20, limits.scratch_mib * 2**20
    wanted = dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE), 0)
    wanted |= dict.fromkeys((resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO), 0)
    wanted |= {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: scratch, resource.RLIMIT_NOFILE: limits.open_files}
    wanted |= {resource.RLIMIT_CPU: cpu, resource.RLIMIT_SIGPENDING: 64, resource.RLIMIT_STACK: _STACK_BYTES}
    if confinement.isolation == "namespaces" or confinement.first_uid is not None:
        # The processes of a user are counted together. Without its own user id or namespace, a program would be limited
        # by the processes of others.
        wanted[resource.RLIMIT_NPROC] = limits.max_tasks
    for limit, soft in wanted.items():
        # A program that catches the signal of the soft CPU limit is killed one second later.
        hard = soft + 1 if limit == resource.RLIMIT_CPU else soft
        _, highest = resource.getrlimit(limit)
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(limit, (soft, hard))


def command_paths(commands: Sequence[str]) -> list[str]:
    """Return the folders that programs search for commands: Python's own folder and these; none without these."""
    if not commands:
        return []
    python = os.path.join(sysconfig.get_config_var("exec_prefix") or sys.base_prefix, "bin")
    return list(dict.fromkeys([python, *map(os.path.abspath, commands)]))


def readable_paths(python_path: Sequence[str] = ()) -> list[str]:
    """Return the paths that programs may read: Python's library, shared libraries of its modules, and `python_path`."""
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    library += [os.path.join(sysconfig.get_config_var("exec_prefix") or "", "lib")]
    candidates = [*library, *_LIBRARIES, *_DATA, *python_path]
    existing = dict.fromkeys(os.path.realpath(path) for path in candidates if os.path.exists(path))
    return [path for path in existing if not any(_is_below(path, other) for other in existing if other != path)]


def devices() -> list[str]:
    """Return the devices that programs may use, `/dev/null` first."""
    # A program that may write to /dev/zero gets shared memory from it. Only Landlock can allow reading without writing.
    candidates = [*_DEVICES, "/dev/zero"] if syscalls.landlock_version() else _DEVICES
    return [path for path in candidates if os.path.exists(path)]


def enter_namespaces(flags: int) -> None:
    """Leave the namespaces in `flags`, which include mounts, and let no mount reach the old one.

    Everything that mounts comes after this: everybody would see a mount in the machine's own namespace.
    """
    assert flags & syscalls.CLONE_NEWNS
    syscalls.unshare(flags)
    syscalls.mount("none", "/", None, MS_REC | MS_PRIVATE)


def map_user(table: ProcessTable, uid: int, gid: int) -> None:
    """Create this process's user and group in the user namespace that it has just entered."""
    table.write("self/setgroups", "deny")
    table.write("self/uid_map", f"{uid} {uid} 1")
    table.write("self/gid_map", f"{gid} {gid} 1")


def enter_root(readable: Sequence[str], commands: Sequence[str] = ()) -> None:
    """Make a small read-only root of these paths and a few devices, and make it this process's own.

    Only after `enter_namespaces`.

    Args:
        readable: Paths, without links.
        commands: Folders among them, by the paths that programs use.
    """
    stage = next(path for path in _STAGES if os.path.isdir(path) and not any(_is_below(r, path) for r in readable))
    syscalls.mount("sandbox", stage, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in readable:
        _bind(path, stage, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for path in (*_LIBRARIES, *commands):
        if os.path.islink(path) and not os.path.lexists(stage + path):
            os.symlink(os.readlink(path), stage + path)
    for path in devices():
        _bind(path, stage, MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    for folder in (SCRATCH, "/old"):
        os.mkdir(stage + folder)
    if not os.path.exists(f"{stage}/tmp"):
        os.symlink(SCRATCH, f"{stage}/tmp")
    syscalls.pivot_root(stage, f"{stage}/old")
    os.chdir("/")
    syscalls.umount("/old")
    os.rmdir("/old")
    syscalls.protect_mount("/", MS_RDONLY, recursive=False)


def mount_scratch(size_mib: int, uid: int, gid: int, *, executes: bool = False) -> None:
    """Mount an empty scratch folder of a limited size, in the memory of the machine.

    Args:
        size_mib: Its size.
        uid: Its user.
        gid: Its group.
        executes: True if files in it may be executed.
    """
    options = f"size={size_mib}m,nr_inodes={max(64, 16 * size_mib)},mode=700,uid={uid},gid={gid}"
    flags = MS_NOSUID | MS_NODEV | (0 if executes else MS_NOEXEC)
    syscalls.mount("scratch", SCRATCH, "tmpfs", flags, options)


def _bind(path: str, stage: str, flags: int) -> None:
    target = stage + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.mount(path, target, None, MS_BIND | MS_REC)
    syscalls.protect_mount(target, flags)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
