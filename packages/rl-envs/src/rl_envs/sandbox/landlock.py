"""Landlock: the files, the network ports and the processes that this process may reach (Linux 5.13 and later).

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from rl_envs.sandbox import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _NET_PORT = 1, 1, 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_FIRST_VERSION = (1 << 13) - 1
_CONNECT_AND_BIND_TCP, _CONNECT_TCP = 0b11, 0b10
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

COMPLETE = 6
"""First version of Landlock that covers files, TCP, abstract sockets and signals (Linux 6.12)."""


def version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    try:
        return syscalls.syscall(_CREATE_RULESET, 0, 0, _VERSION)
    except OSError:
        return 0


def restrict(*, readable: Iterable[str], writable: Iterable[str], executes: bool = False, port: int = 0) -> None:
    """Deny all files but these folders and files, TCP, abstract sockets of others and signals to others, as far as the
    kernel's version covers them; needs `no_new_privs`.

    Args:
        readable: Files and folders that may be read.
        writable: Files and folders that may be read and written.
        executes: True if files of all of them may be executed.
        port: TCP port that may be connected to; 0 for none.
    """
    known = version()
    files = _FIRST_VERSION
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        files |= right if known >= since else 0
    network = _CONNECT_AND_BIND_TCP if known >= 4 else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= COMPLETE else 0
    # as long as the fields that the version knows
    attributes = struct.pack("QQQ", files, network, scope)[: 8 if known < 4 else 16 if known < COMPLETE else 24]
    ruleset = syscalls.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    execute = _EXECUTE if executes else 0
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIR | execute)
        for path in writable:
            _allow(ruleset, path, files & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV) | execute)
        if port and network:
            rule = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT_TCP, port))
            syscalls.syscall(_ADD_RULE, ruleset, _NET_PORT, rule, 0)
        syscalls.syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _WRITE_FILE | _READ_FILE | _EXECUTE | (_TRUNCATE if rights & _TRUNCATE else 0)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, beneath))
        syscalls.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(beneath)
