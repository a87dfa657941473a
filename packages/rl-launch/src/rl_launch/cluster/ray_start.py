"""Connecting to a Ray cluster, and further attempts after Ray fails to start."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
import ray._private.worker as ray_worker

from rl_core.errors import RLError
from rl_launch.cluster.ray_address import check_ray_address, is_host_and_port, nobody_answers
from rl_launch.cluster.ray_token import use_token_of

_log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""Ray's raylet misses its own fixed start-up deadline of 30 s on a busy machine; another attempt succeeds."""

UNREACHABLE = (
    "Its processes may not reach one another over the network of this machine: check the firewall, the loopback "
    "interface and the address of its host name, and run `rl doctor`."
)
"""Reason and remedy for a Ray of this machine that starts but does not answer."""

T = TypeVar("T")


def connect(address: str, *, is_own: bool) -> None:
    """Connect this process to the Ray cluster at an address.

    Args:
        address: Address of the cluster, such as `10.0.0.1:6379`.
        is_own: True if this process started the cluster; otherwise RAY_ADDRESS names it.

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
    _log_errors()


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Context that leaves this program's handler of SIGTERM in place. `ray.init` replaces it by one that only exits,
    and Ray's library by one that prints its stack. Without a handler of this program, Ray's stay.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _log_errors() -> None:
    """Send Ray's own errors to the log. It prints them on the terminal even without `log_to_driver`, with a dump of its
    state (`listen_error_messages` in ray/_private/worker.py, which has no option for it).
    """

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        del ignore_prefix
        for line in data["lines"]:
            _log.debug("Ray: %s", line)

    ray_worker.print_to_stdstream = log


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
                raise RLError(
                    f"Ray did not start in {START_ATTEMPTS} attempts; the last said: {error}\n{_start_remedy()}"
                ) from error
            _log.warning("Ray did not start (%s); trying again", str(error).splitlines()[0])
            time.sleep(2.0)
    raise AssertionError("the last attempt returns or raises")


def _start_remedy() -> str:
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= num_cores:
        return "Run `rl doctor` to check this machine, then start the run again."
    return (
        f"This machine is busy (load {load:.0f} on {num_cores} cores), and Ray allows a start only 30 s. Start the run "
        "again when the machine is less busy."
    )
