"""System calls that Python 3.11's standard library lacks, and rules of Landlock.

Landlock limits the files, the network ports and the processes that this process may reach (Linux 5.13 and later):
https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

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

PROGRAM_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
"""Flags of the namespaces that each program has."""

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


def syscall(number: int, *arguments: int | bytes | ctypes.c_void_p | ctypes.Array[ctypes.c_char]) -> int:
    """Call the kernel by number; raises `OSError`."""
    given = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return _checked(_libc.syscall(ctypes.c_long(number), *given), f"system call {number}")


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a filesystem, or bind a path."""
    encoded = None if kind is None else kind.encode()
    given = (source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode() or None)
    _checked(_libc.mount(*given), f"mount {target}")


def umount(target: str) -> None:
    """Detach what is mounted at a path."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root, and mount the root that it replaces at `old`."""
    syscall(_PIVOT_ROOT[platform.machine()], new.encode(), old.encode())


def protect_mount(path: str, flags: int, *, recursive: bool = True) -> None:
    """Add flags (`MS_RDONLY`, `MS_NOSUID`, ...) to a mount and, if recursive, to those within it."""
    # The attributes are flags to set, flags to clear, a propagation and a user namespace.
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    here, path_of, at = ctypes.c_int(-100), ctypes.c_char_p(path.encode()), _AT_RECURSIVE if recursive else 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    number, at_flags = ctypes.c_long(_MOUNT_SETATTR), ctypes.c_uint(at)
    result = _libc.syscall(number, here, path_of, at_flags, ctypes.byref(attributes), size)
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


def drop_bounding_set() -> None:
    """Make it impossible to gain capabilities again; needs CAP_SETPCAP."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            return  # The kernel knows no more, or this process may not.


def drop_capabilities() -> None:
    """Give up all capabilities of this process."""
    # The header is the version 3 of the call, and the process id 0 for this process.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    empty = (ctypes.c_uint32 * 6)()
    result = _libc.syscall(ctypes.c_long(_CAPSET[platform.machine()]), ctypes.byref(header), ctypes.byref(empty))
    _checked(result, "capset")


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _PATH_BENEATH, _NET_PORT = 1, 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_FIRST_VERSION = (1 << 13) - 1
_CONNECT_AND_BIND_TCP, _CONNECT_TCP = 0b11, 0b10
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

LANDLOCK_COMPLETE = 6
"""First version of Landlock that covers files, TCP, abstract sockets and signals (Linux 6.12)."""


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    try:
        return syscall(_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)
    except OSError:
        return 0


def restrict_files(*, readable: Iterable[str], writable: Iterable[str], executes: bool = False, port: int = 0) -> None:
    """Deny all files except these folders and files, TCP, abstract sockets of others and signals to others.

    The kernel's version may not cover all of these. Needs `no_new_privs`.

    Args:
        readable: Files and folders that may be read.
        writable: Files and folders that may be read and written.
        executes: True if files of all of them may be executed.
        port: TCP port that may be connected to; 0 for none.
    """
    known = landlock_version()
    files = _FIRST_VERSION
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        files |= right if known >= since else 0
    network = _CONNECT_AND_BIND_TCP if known >= 4 else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= LANDLOCK_COMPLETE else 0
    # The structure is as long as the fields that the version knows.
    attributes = struct.pack("QQQ", files, network, scope)[
        : 8 if known < 4 else 16 if known < LANDLOCK_COMPLETE else 24
    ]
    ruleset = syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    execute = _EXECUTE if executes else 0
    all_rights = files & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV) | execute
    allowed = [(path, _READ_FILE | _READ_DIR | execute) for path in readable]
    allowed += [(path, all_rights) for path in writable]
    try:
        for path, rights in allowed:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if not os.path.isdir(path):
                    rights &= _WRITE_FILE | _READ_FILE | _EXECUTE | (_TRUNCATE if rights & _TRUNCATE else 0)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, beneath))
                syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
            finally:
                os.close(beneath)
        if port and network:
            rule = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT_TCP, port))
            syscall(_ADD_RULE, ruleset, _NET_PORT, rule, 0)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
