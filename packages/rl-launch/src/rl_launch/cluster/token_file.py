"""The file that holds the token of Ray clusters."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def default_token_file() -> Path:
    """Return the file in which Ray looks for a token by default."""
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
    return (
        f"Other users can access {path}, whose token lets them run code on your Ray clusters",
        f"Run: chmod 600 {path}",
    )
