"""System calls that Python 3.11's standard library lacks."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)

MACHINES = ("x86_64", "aarch64")
"""Machines whose system calls are known here."""

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWTIME = 0x00000080

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_AT_RECURSIVE = 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 36, 38, 41
_LAST_CAPABILITY = 63


def machine() -> str:
    """Name of this machine's instruction set."""
    return platform.machine()


def syscall(number: int, *arguments: int | bytes | ctypes.c_void_p | ctypes.Array[ctypes.c_char]) -> int:
    """Call the kernel by number; raises `OSError`."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(_argument, arguments))
    return _checked(result, f"system call {number}")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a filesystem, or bind a path."""
    encoded = None if kind is None else kind.encode()
    _checked(
        _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode() or None),
        f"mount {target}",
    )


def umount(target: str) -> None:
    """Detach what is mounted at a path."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root, and mount the root that it replaces at `old`."""
    syscall(_PIVOT_ROOT[machine()], new.encode(), old.encode())


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def protect_mount(path: str, flags: int, *, recursive: bool = True) -> None:
    """Add flags (`MS_RDONLY`, `MS_NOSUID`, ...) to a mount and, if recursive, to those within it."""
    attributes = _MountAttributes(flags, 0, 0, 0)
    at = _AT_RECURSIVE if recursive else 0
    here = -100
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(here),
        ctypes.c_char_p(path.encode()),
        ctypes.c_uint(at),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(result, f"mount_setattr {path}")


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    """Set a property of this process."""
    arguments = (ctypes.c_ulong(argument) for argument in (value, third, 0, 0))
    _checked(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends; `setresuid` undoes it."""
    prctl(_PR_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Gain no privilege from any program that this process or a child executes."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def use_small_pages() -> None:
    """Give this process and its descendants no huge pages: one stays in memory until all of it is given up."""
    prctl(_PR_SET_THP_DISABLE, 1)


def hide_from_tracers() -> None:
    """Forbid processes of the same user to trace this one or read its memory."""
    prctl(_PR_SET_DUMPABLE, 0)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_bounding_set() -> None:
    """Make it impossible to gain capabilities again; needs CAP_SETPCAP."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            return  # the kernel knows no more, or this process may not


def drop_capabilities() -> None:
    """Give up all capabilities of this process."""
    version_3 = 0x20080522
    header = _CapabilityHeader(version_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    result = _libc.syscall(ctypes.c_long(_CAPSET[machine()]), ctypes.byref(header), ctypes.byref(empty))
    _checked(result, "capset")


def _argument(value: object) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
