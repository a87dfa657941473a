"""Becoming a user without privileges who can still read Python and its packages, to try a sandbox as such a user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rl_envs.sandbox import syscalls
from rl_envs.sandbox.filesystem import enter_namespaces

_STAGE = "/mnt"


def become(uid: int) -> None:
    """Give up root for another user id, for good; this process must have one thread.

    Folders that only root may enter (`/root` with a Python below it) are covered by empty ones in a namespace of
    mounts, in which Python and its packages stay where they were.

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
    """Cover a folder by one that has these paths below it only."""
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
