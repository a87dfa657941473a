"""Text files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from rl_core.errors import named
from rl_launch.session.checkpoints.manifest import sync_folder


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file so that a reader, a kill or a power cut finds the old contents or the new ones.

    A process that is killed may leave `NAME.part` in the folder, which the next write of the same file replaces.
    """
    aside = path.with_name(f"{path.name}.part")
    with named(path), aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)
