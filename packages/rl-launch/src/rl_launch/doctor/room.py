"""Free space of file systems. Standard library only: `rl doctor --cluster` sends this module to the nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Room:
    """Space of a file system.

    Args:
        folder: Folder on it.
        total_bytes, free_bytes: Size, and free space for this user.
        is_writable: True if this user may write there.
    """

    folder: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


def room(folder: Path) -> Room:
    """Return the space of a folder, or of the one that it would be made in."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    system = os.statvfs(there)
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Room(str(folder), system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize, is_writable)


def size(num_bytes: float) -> str:
    """Return a number of bytes in words, such as `1.5 GiB`."""
    gib = num_bytes / GIB
    return f"{gib:,.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.0f} MiB"
