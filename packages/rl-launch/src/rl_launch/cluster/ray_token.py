"""The token that admits processes to a Ray cluster: whoever reads it can run code as the user who started it."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)

from rl_core.errors import ConfigError
from rl_launch.cluster.token_file import default_token_file, has_token, is_token_mode, token_file, token_problem

_log = logging.getLogger(__name__)

_NEEDS_TOKEN = 3
_PROBE = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    sys.exit({_NEEDS_TOKEN})
"""
_PROBE_TIMEOUT_S = 60.0


def secure_new_cluster() -> None:
    """Turn on token authentication for a cluster that this process will start, as `ray.init` does.

    A token that does not exist is created readable only by this user: Ray would leave its mode to the umask.
    RAY_AUTH_MODE, RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH are respected.
    """
    enable_token_auth_by_default()
    if is_token_mode():
        if not has_token():
            create_token_file(default_token_file())
        protect_token_file()
    ensure_token_if_auth_enabled(create_token_if_missing=True)


def use_token_of(address: str) -> None:
    """Turn on token authentication for this process if the cluster at `host:port` requires it.

    Without RAY_AUTH_MODE, Ray sends no token to a cluster that is given by its address. A process that requires tokens
    in a cluster without them does not work either, so the cluster is asked first.

    Raises:
        ConfigError: If the cluster requires a token and there is none.
    """
    if "RAY_AUTH_MODE" in os.environ or not _requires_token(address):
        return
    if not has_token():
        raise ConfigError(
            f"The Ray cluster at RAY_ADDRESS={address} requires a token, and this node has none. On every node, also "
            "this one, set RAY_AUTH_MODE=token and make the head node's ~/.ray/auth_token available: by a shared home "
            "folder, a copy that RAY_AUTH_TOKEN_PATH names, or RAY_AUTH_TOKEN."
        )
    protect_token_file()
    enable_token_auth_by_default()


def create_token_file(path: Path) -> None:
    """Write a new random token to a file of mode 0600, in a folder of mode 0700 unless it exists.

    The file appears with its contents. If another process creates it first, that one stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # created with O_EXCL and mode 0600, whatever the umask
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(name, path)
        except FileExistsError:
            return
    finally:
        os.unlink(name)


def protect_token_file() -> None:
    """Make Ray's own token file readable only by this user, and warn about files that others can still read."""
    path = default_token_file()
    if token_file() == path and path.is_file() and path.stat().st_uid == os.geteuid():
        for each, excess in ((path, stat.S_IRWXG | stat.S_IRWXO), (path.parent, stat.S_IWGRP | stat.S_IWOTH)):
            mode = stat.S_IMODE(each.stat().st_mode)
            if mode & excess and each.stat().st_uid == os.geteuid():
                each.chmod(mode & ~excess)
    if (problem := token_problem()) is not None:
        _log.warning("%s. %s", *problem)


def _requires_token(address: str) -> bool:
    # in a process of its own: Ray prints the refusal, and reads its settings when it is imported
    command = [sys.executable, "-P", "-c", _PROBE, address]
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_py_gcs_connect_timeout_s": "5"}
    try:
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == _NEEDS_TOKEN
