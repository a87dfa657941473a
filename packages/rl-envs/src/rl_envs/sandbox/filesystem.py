"""The files that a program sees: Python's library, a few devices and its own scratch folder."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence

from rl_envs.sandbox import landlock, syscalls
from rl_envs.sandbox.processes import ProcessTable
from rl_envs.sandbox.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC

SCRATCH = "/scratch"
"""A program's current folder, if it has its own root."""

_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_DATA = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_STAGES = ("/sys", "/mnt", "/media", "/srv", "/proc", "/home")


def command_paths(commands: Sequence[str]) -> list[str]:
    """Folders in which programs look for commands: that of Python itself, and these; none if these are none."""
    if not commands:
        return []
    python = os.path.join(sysconfig.get_config_var("exec_prefix") or sys.base_prefix, "bin")
    return list(dict.fromkeys([python, *map(os.path.abspath, commands)]))


def readable_paths(python_path: Sequence[str] = ()) -> list[str]:
    """Paths that programs may read: Python's library, the shared libraries that its modules load, and `python_path`."""
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    library += [os.path.join(sysconfig.get_config_var("exec_prefix") or "", "lib")]
    candidates = [*library, *_LIBRARIES, *_DATA, *python_path]
    existing = dict.fromkeys(os.path.realpath(path) for path in candidates if os.path.exists(path))
    return [path for path in existing if not any(_is_below(path, other) for other in existing if other != path)]


def devices() -> list[str]:
    """Devices that programs may use, `/dev/null` first."""
    # whoever may write to /dev/zero gets shared memory from it; only Landlock lets programs read without writing
    candidates = [*_DEVICES, "/dev/zero"] if landlock.version() else _DEVICES
    return [path for path in candidates if os.path.exists(path)]


def enter_namespaces(flags: int) -> None:
    """Leave the namespaces that `flags` names, the one of mounts among them, and let no mount reach the old one.

    Everything that mounts comes after this: a mount in the machine's own namespace would be everybody's.
    """
    assert flags & syscalls.CLONE_NEWNS
    syscalls.unshare(flags)  # raises unless it did
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
        commands: Folders among them, as programs name them.
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
