"""Notifications on their way, in a thread that holds nobody up."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rl_launch.monitoring.delivery import Delivery, DeliveryError

_log = logging.getLogger(__name__)

ATTEMPTS_AFTER_S = (2.0, 10.0, 30.0)
"""Seconds before each further attempt of a delivery that failed."""

MOST_WAITING = 100
"""Notifications that wait at most; further ones are dropped, with a line in the log."""


class Outbox:
    """Delivers notifications in order. The thread ends with the process, so that nothing keeps it.

    Args:
        deliveries: Ways in which each is delivered.
        attempts_after_s: Seconds before each further attempt.
    """

    def __init__(self, deliveries: Sequence[Delivery], *, attempts_after_s: Sequence[float] = ATTEMPTS_AFTER_S) -> None:
        self._deliveries = list(deliveries)
        self._attempts_after_s = attempts_after_s
        self._waiting: queue.Queue[Mapping[str, Any]] = queue.Queue(MOST_WAITING)
        self._changed = threading.Condition()
        self._num_open = 0
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, notification: Mapping[str, Any]) -> None:
        """Deliver a notification; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
            self._thread.start()
        with self._changed:
            self._num_open += 1
        try:
            self._waiting.put_nowait(notification)
        except queue.Full:
            self._note_done()
            _log.warning("a notification (%s) was dropped: %d others wait", notification.get("event"), MOST_WAITING)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is delivered, with at most one attempt of each that has not been tried.

        Args:
            timeout_s: Maximum time.
        """
        self._is_ending.set()
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_open == 0, timeout_s):
                _log.warning("%d notification(s) were not delivered in time", self._num_open)

    def _run(self) -> None:
        while True:
            notification = self._waiting.get()
            for delivery in self._deliveries:
                self._deliver(delivery, notification)
            self._note_done()

    def _note_done(self) -> None:
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def _deliver(self, delivery: Delivery, notification: Mapping[str, Any]) -> None:
        num_attempts = 0
        for pause_s in (*self._attempts_after_s, None):
            num_attempts += 1
            try:
                delivery.deliver(notification)
                return
            except DeliveryError as error:
                failure, is_final = str(error), error.is_final
            except Exception as error:  # noqa: BLE001  # the thread delivers the others; the text may hold a secret
                failure, is_final = type(error).__name__, True
            # nobody waits for further attempts when the run ends
            if pause_s is None or is_final or self._is_ending.wait(pause_s):
                break
        _log.warning(
            "%s did not get the notification %r after %d attempt(s): %s",
            delivery,
            notification.get("event"),
            num_attempts,
            failure,
        )
