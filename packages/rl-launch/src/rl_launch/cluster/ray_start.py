"""Starting Ray on this machine, or connecting to one that runs."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
import ray._private.worker as ray_worker

from rl_core.errors import RLError
from rl_launch.cluster.ray_address import check_ray_address, nobody_answers

_log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""Ray's raylet misses its own fixed start-up deadline of 30 s on a busy machine; a further try succeeds."""

T = TypeVar("T")

_started: set[str] = set()
"""Addresses of the Rays that this process started for itself alone."""


def connect(address: str) -> None:
    """Connect this process to the Ray cluster at an address.

    Raises:
        ConfigError: if nobody answers there.
        RLError: if Ray fails in another way.
    """
    check_ray_address()

    def attempt() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise nobody_answers(address, str(error)) from None

    with sessions_of_their_own():
        retried(attempt, ray.shutdown)
    _log_errors()


def start_on_this_machine(num_cpus: int) -> None:
    """Start a Ray of this process's own on this machine, with so many CPUs at least.

    Raises:
        RLError: if it does not start.
    """
    settings: dict[str, Any] = {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, num_cpus),
        "include_dashboard": False,
        "object_store_memory": object_store_bytes(),
    }
    with sessions_of_their_own():
        retried(lambda: ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR), ray.shutdown)
    _log_errors()
    _started.add(ray.get_runtime_context().gcs_address)


def is_on_this_machine_alone() -> bool:
    """Whether the Ray that this process is connected to was started by it, and has no other node."""
    return ray.get_runtime_context().gcs_address in _started


def _log_errors() -> None:
    """Have Ray's own errors go to the log. Whatever `log_to_driver` says, it prints them on the terminal, with a
    dump of its state (`listen_error_messages` in ray/_private/worker.py, which has no option for it).
    """

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        del ignore_prefix
        for line in data["lines"]:
            _log.debug("Ray: %s", line)

    ray_worker.print_to_stdstream = log


def retried(start: Callable[[], T], clean_up: Callable[[], object]) -> T:
    """Start something of Ray's, up to `START_ATTEMPTS` times.

    Args:
        start: starts it.
        clean_up: removes what a failed attempt left.

    Raises:
        RLError: if no attempt succeeds, with the last reason; errors of this project at once.
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
                raise RLError(f"Ray did not start in {START_ATTEMPTS} attempts; the last said: {error}") from error
            _log.warning("Ray did not start (%s); trying again", str(error).splitlines()[0])
            time.sleep(2.0)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """Have processes that are started meanwhile lead sessions of their own.

    A signal to the driver's process group (`timeout`, Slurm, a terminal) then reaches the driver alone, which ends Ray
    when it has saved; where the driver dies the kernel ends Ray. Ray has no option for it.
    """
    start = subprocess.Popen.__init__

    def start_apart(self: Any, *args: Any, **named: Any) -> None:
        start(self, *args, **{"start_new_session": True, **named})

    subprocess.Popen.__init__ = start_apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def object_store_bytes() -> int:
    """Memory for the object stores of this machine, together."""
    shared = os.statvfs("/dev/shm")
    free = shared.f_bavail * shared.f_frsize
    return int(max(80 * 2**20, min(0.3 * free, 64 * 2**30)))
