"""The folder of Ray's sockets, logs and spilled objects, and the file with the token of Ray clusters."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from rl_core.errors import ConfigError

_LONGEST_SOCKET = 107
_SOCKET_IN_FOLDER = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")


def ray_folder() -> Path:
    """Return the folder for a Ray that a run starts: under RAY_TMPDIR, or in a folder that only this user enters.

    Ray's own choice is `/tmp/ray`. Every user may rename the sessions of the others there.
    """
    named = os.environ.get("RAY_TMPDIR")
    return (Path(named) if named else _private_folder()) / "ray"


def prepare_ray_folder() -> Path:
    """Create the parent of `ray_folder`, unless RAY_TMPDIR is set, and return the folder for RAY_TMPDIR.

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
        # Another user may have been faster since the check above.
        if (problem := _owner_problem(private)) is not None:
            raise ConfigError(". ".join(problem))
        private.chmod(0o700)
    return private


def folder_problem(folder: Path) -> tuple[str, str] | None:
    """Return why Ray cannot start with its folder there, and the remedy; None if it can.

    The operating system limits the paths of its sockets, and Ray reports that only after it has tried.
    """
    if len(str(folder)) + _SOCKET_IN_FOLDER > _LONGEST_SOCKET:
        longest = _LONGEST_SOCKET - _SOCKET_IN_FOLDER - len("/ray")
        remedy = f"Set RAY_TMPDIR to a folder of at most {longest} characters."
        return f"the path {folder} is too long for Ray's sockets", remedy
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


def default_token_file() -> Path:
    """Return the file that Ray looks for a token in by default."""
    return Path.home() / ".ray" / "auth_token"


def token_file() -> Path | None:
    """Return the file that Ray reads its token from; None if RAY_AUTH_TOKEN holds the token itself."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named).expanduser() if named else default_token_file()


def has_token() -> bool:
    """Return whether a token is at hand, or is named: Ray reports a named file that does not exist."""
    path = token_file()
    return path is None or bool(os.environ.get("RAY_AUTH_TOKEN_PATH")) or path.is_file()


def is_token_mode() -> bool:
    """Return whether RAY_AUTH_MODE turns token authentication on."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def token_problem() -> tuple[str, str] | None:
    """Return why other users can take this user's token, and the remedy; None if they cannot."""
    path = token_file()
    if path is None or not path.is_file():
        return None
    if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO) == 0:
        return None
    problem = f"Other users can access {path}, whose token lets them run code on your Ray clusters"
    return problem, f"Run: chmod 600 {path}"
