"""The folder in which Ray puts its sockets, logs and spilled objects."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from rl_core.errors import ConfigError

_LONGEST_SOCKET = 107
_SOCKET_IN_FOLDER = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")


def ray_folder() -> Path:
    """Return the folder for a Ray that a run starts: under RAY_TMPDIR, or else in a folder that only this user enters.

    Ray's own choice is `/tmp/ray`, in which every user may rename the sessions of the others.
    """
    named = os.environ.get("RAY_TMPDIR")
    return (Path(named) if named else _private_folder()) / "ray"


def prepare_ray_folder() -> Path:
    """Create the parent of `ray_folder`, unless RAY_TMPDIR names one, and return the folder for RAY_TMPDIR.

    Raises:
        ConfigError: If Ray cannot start there.
    """
    folder = ray_folder()
    if (problem := folder_problem(folder)) is not None:
        raise ConfigError(". ".join(problem))
    private = folder.parent
    if not os.environ.get("RAY_TMPDIR"):
        private.parent.mkdir(parents=True, exist_ok=True)
        private.mkdir(mode=0o700, exist_ok=True)
        # another user may have been faster since the check above
        if (problem := _owner_problem(private)) is not None:
            raise ConfigError(". ".join(problem))
        private.chmod(0o700)
    return private


def folder_problem(folder: Path) -> tuple[str, str] | None:
    """Return why Ray cannot start with its folder there, and the remedy; None if it can.

    The paths of its sockets are limited by the operating system, and Ray says so only after it has tried.
    """
    if len(str(folder)) + _SOCKET_IN_FOLDER > _LONGEST_SOCKET:
        longest = _LONGEST_SOCKET - _SOCKET_IN_FOLDER - len("/ray")
        return (
            f"the path {folder} is too long for Ray's sockets",
            f"Set RAY_TMPDIR to a folder of at most {longest} characters.",
        )
    return _owner_problem(folder.parent) if folder.parent == _private_folder() else None


def remove_session(session: Path, *, keep_logs: bool) -> None:
    """Remove the folder of a Ray session that has ended.

    Args:
        session: Folder of the session, in a `ray_folder`.
        keep_logs: Leave its `logs` folder, for example because a process of Ray's died.
    """
    if keep_logs:
        for path in session.iterdir() if session.is_dir() else ():
            if path.is_dir() and not path.is_symlink() and path.name != "logs":
                shutil.rmtree(path, ignore_errors=True)
        return
    shutil.rmtree(session, ignore_errors=True)
    latest = session.parent / "session_latest"
    if latest.is_symlink() and latest.readlink().name == session.name:
        latest.unlink(missing_ok=True)


def _private_folder() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"ray-{os.geteuid()}"


def _owner_problem(folder: Path) -> tuple[str, str] | None:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        return None
    return (
        f"{folder}, the folder for your Ray, is not a folder that belongs to you",
        "Remove it, or set RAY_TMPDIR to a folder that belongs to you.",
    )
