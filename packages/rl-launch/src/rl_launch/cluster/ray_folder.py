"""The folder in which Ray puts its sockets, logs and spilled objects."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST_SOCKET = 107
_SOCKET_IN_FOLDER = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")


def ray_folder() -> Path:
    """Return the folder that Ray will use."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def folder_problem(folder: Path) -> tuple[str, str] | None:
    """Return why Ray cannot start with its folder there, and the remedy; None if it can.

    The paths of its sockets are limited by the operating system, and Ray says so only after it has tried.
    """
    if len(str(folder)) + _SOCKET_IN_FOLDER <= _LONGEST_SOCKET:
        return None
    longest = _LONGEST_SOCKET - _SOCKET_IN_FOLDER - len("/ray")
    return (
        f"the path {folder} is too long for Ray's sockets",
        f"Set RAY_TMPDIR to a folder of at most {longest} characters.",
    )
