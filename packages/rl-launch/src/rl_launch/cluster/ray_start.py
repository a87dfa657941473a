"""Connecting to a Ray cluster, with its token, and further attempts after Ray fails to start.

The token admits processes to a cluster: whoever reads it can run code as the user who started the cluster.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray._private.worker as ray_worker
from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)

from rl_core.errors import ConfigError, RLError
from rl_launch.cluster.machine import check_ray_address, is_host_and_port, nobody_answers
from rl_launch.cluster.ray_files import default_token_file, has_token, is_token_mode, token_file, token_problem

_log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""Ray's raylet misses its own fixed start-up deadline of 30 s on a busy machine; another attempt succeeds."""

UNREACHABLE = (
    "Its processes may not reach one another over the network of this machine: check the firewall, the loopback "
    "interface and the address of its host name, and run `rl doctor`."
)
"""Reason and remedy for a Ray of this machine that starts but does not answer."""

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

T = TypeVar("T")


def connect(address: str, *, is_own: bool) -> None:
    """Connect this process to the Ray cluster at an address.

    Args:
        address: Address of the cluster, such as `10.0.0.1:6379`.
        is_own: True if this process started the cluster; otherwise it is the one at RAY_ADDRESS.

    Raises:
        ConfigError: If no cluster answers at RAY_ADDRESS, or it requires a token that is not at hand.
        RLError: If the cluster that this process started does not answer, or Ray fails in another way.
    """
    if not is_own:
        check_ray_address()
        if is_host_and_port(address):
            use_token_of(address)

    def attempt() -> None:
        try:
            with own_sigterm_handler():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            if is_own:
                raise RLError(
                    f"the Ray that this run started at {address} does not answer: {error}\n"
                    "Its processes may have been ended by someone else, or for lack of memory. Run `rl doctor`, then "
                    "start the run again."
                ) from None
            raise nobody_answers(address, str(error)) from None

    retried(attempt, ray.shutdown)

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        del ignore_prefix
        for line in data["lines"]:
            _log.debug("Ray: %s", line)

    # Send Ray's own errors to the log. It prints them on the terminal even without `log_to_driver`, with a dump of its
    # state (`listen_error_messages` in ray/_private/worker.py, which has no option for it).
    ray_worker.print_to_stdstream = log


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Leave this program's handler of SIGTERM in place in the context. `ray.init` replaces it by one that only exits,
    and Ray's library by one that prints its stack. Without a handler of this program, Ray's stay.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def retried(start: Callable[[], T], clean_up: Callable[[], object]) -> T:
    """Start something of Ray's, up to `START_ATTEMPTS` times.

    Args:
        start: Starts it.
        clean_up: Removes the remains of a failed attempt.

    Raises:
        RLError: If no attempt succeeds, with the last reason; errors of this project at once.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return start()
        except RLError:
            clean_up()
            raise
        except Exception as error:
            clean_up()
            if attempt == START_ATTEMPTS:
                remedy = "Run `rl doctor` to check this machine, then start the run again."
                if (load := os.getloadavg()[0]) > (num_cores := os.cpu_count() or 1):
                    remedy = (
                        f"This machine is busy (load {load:.0f} on {num_cores} cores), and Ray allows a start only "
                        "30 s. Start the run again when the machine is less busy."
                    )
                problem = f"Ray did not start in {START_ATTEMPTS} attempts; the last said: {error}"
                raise RLError(f"{problem}\n{remedy}") from error
            _log.warning("Ray did not start (%s); trying again", str(error).splitlines()[0])
            time.sleep(2.0)
    raise AssertionError("the last attempt returns or raises")


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
    in a cluster without them does not work either, so this asks the cluster first.

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
    # The file is created with O_EXCL and mode 0600, regardless of the umask.
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
    # A separate process asks, because Ray prints the refusal, and reads its settings when it is imported.
    command = [sys.executable, "-P", "-c", _PROBE, address]
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_py_gcs_connect_timeout_s": "5"}
    env = {**os.environ, **settings}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == _NEEDS_TOKEN
