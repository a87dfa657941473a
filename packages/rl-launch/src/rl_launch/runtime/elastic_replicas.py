"""Replicas that join a run in progress. They are started in the background when the cluster has free devices."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from rl_core.errors import RLError
from rl_launch.cluster.virtual_cluster import Bundle
from rl_launch.placement.bundles import DevicesLost
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.replicas import Replicas

_log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two checks for devices that the cluster has granted."""

RETRY_S = 30.0
"""Time between a replica that did not start and the next attempt; it doubles with each failure in a row."""

MAX_RETRY_S = 1800.0
"""Maximum of this time, in seconds."""

CLOSE_TIMEOUT_S = 30.0

REPORT_S = 15.0


class ElasticReplicas:
    """Starts the replicas that a run lacks. A thread asks for devices, starts replicas on the granted ones, and tries
    again if one does not start. The replicas wait here until the run takes them.

    Args:
        places: Places of replicas; after `begin` only the thread uses them.
        least: Minimum number of replicas of the run.
        most: Maximum number of replicas of the run.
        timeout_s: Timeout in seconds of the wait for a replica that the run needs while none is being started.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, places: Replicas, *, least: int, most: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.least = least
        self._most = most
        self._places = places
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_lacking = 0
        self._leaving: list[Replica] = []
        self._requests: list[list[Bundle]] = []
        self._starting: list[Replica] = []
        self._ready: list[Replica] = []
        self._last_failure = ""
        self._num_failures = 0
        self._retry_at = -math.inf
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="elastic-replicas", daemon=True)

    def begin(self, num_present: int) -> None:
        """Begin to look for the replicas that the run lacks."""
        self._num_lacking = self._most - num_present
        self._thread.start()

    def replace(self, replica: Replica) -> None:
        """Release the devices of a lost replica, and look for another one."""
        with self._changed:
            self._leaving.append(replica)
            self._num_lacking += 1

    def take(self) -> list[Replica]:
        """Return the replicas that have become ready, and hand them over to the run."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            ready, self._ready = self._ready, []
            self._num_lacking -= len(ready)
        return ready

    def await_any(self, num_present: int) -> list[Replica]:
        """Wait until there is at least one replica, then `take`.

        Args:
            num_present: Number of replicas that the run has, fewer than it needs.

        Raises:
            DevicesLost: If no replica was being started for `timeout_s`.
        """
        idle_since = self._clock()
        reported = -math.inf
        while not (ready := self.take()):
            now = self._clock()
            if self._starting:
                idle_since = now
            if now - idle_since >= self._timeout_s:
                why = f"; the last attempt to start one failed: {self._last_failure}" if self._last_failure else ""
                raise DevicesLost(
                    f"policy.generation.min_replicas is {self.least}, but only {num_present} of the run's replicas "
                    f"remain, and the cluster had no devices for another one within {self._timeout_s:.0f} s "
                    f"(cluster.replacement_timeout_s){why}. Run the same command to resume when the cluster has the "
                    "devices, or immediately with a lower min_replicas."
                )
            if now - reported >= REPORT_S:
                reported = now
                _log.warning(
                    "%d replicas remain, but at least %d are required (policy.generation.min_replicas): waiting for %s",
                    num_present,
                    self.least,
                    "a replica that is starting" if self._starting else f"devices, for at most {self._timeout_s:.0f} s",
                )
            with self._changed:
                self._changed.wait(POLL_S)
        return ready

    def close(self) -> None:
        """Start nothing more, and end the replicas that nobody has taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for replica in [*self._starting, *self._ready]:
            replica.kill()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, POLL_S):
                        return
                    leaving, self._leaving = self._leaving, []
                    num_missing = self._num_lacking - len(self._ready) - len(self._requests)
                for replica in leaving:
                    self._places.discard(replica)
                    # The cluster may now grant other devices than the ones that failed.
                    self._num_failures, self._retry_at = 0, -math.inf
                # One request to the cluster stays open for each missing replica.
                self._requests += [self._places.request() for _ in range(num_missing)]
                granted = [devices for devices in self._requests if self._places.is_granted(devices)]
                if granted and self._clock() >= self._retry_at:
                    self._start(granted)
        except BaseException as error:  # noqa: BLE001 - raised by `take` on the run's own thread
            with self._changed:
                self._fault = None if self._is_closed else error
                self._changed.notify_all()

    def _start(self, granted: list[list[Bundle]]) -> None:
        """Start a replica on each of these devices, all at the same time."""
        starts = []
        failures: list[RLError] = []
        for devices in granted:
            self._requests.remove(devices)
            try:
                replica, finish = self._places.begin_on(devices)
            except RLError as error:
                self._places.give_back(devices)
                failures.append(error)
                continue
            starts.append((replica, finish))
            self._starting.append(replica)
        for replica, finish in starts:
            try:
                finish()
            except RLError as error:
                self._places.discard(replica)
                failures.append(error)
                self._starting.remove(replica)
                continue
            _log.info("%s is ready and joins at the next weight update", replica)
            with self._changed:
                self._starting.remove(replica)
                self._ready.append(replica)
                self._changed.notify_all()
        self._num_failures = self._num_failures + 1 if failures else 0
        if failures and not self._is_closed:
            retry_s = min(MAX_RETRY_S, RETRY_S * 2 ** (self._num_failures - 1))
            self._retry_at = self._clock() + retry_s
            self._last_failure = " ".join(str(failures[0]).split())
            _log.warning("another replica did not start: %s; retrying in %.0f s", self._last_failure, retry_s)
