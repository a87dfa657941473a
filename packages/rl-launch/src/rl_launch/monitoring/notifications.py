"""Notifications of a run: its events, and the thread that delivers them to webhooks and commands."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from statistics import median
from typing import Any, Protocol
from urllib.parse import urlsplit

from rl_core.errors import ConfigError
from rl_core.run import RunEnd
from rl_launch.monitoring.quantities import PREFIX
from rl_launch.run_session.config import Event, NotifyConfig
from rl_launch.run_session.observer import ObservedRun, RunObserver

ATTEMPTS_AFTER_S = (2.0, 10.0, 30.0)
"""Seconds before each further attempt of a delivery that failed."""

MAX_WAITING = 100
"""Notifications that wait at most; further ones are dropped, with a line in the log."""


USUAL_OF = 16
"""Last steps whose time is usual."""

MIN_S = 60.0
"""Time without a step below which no run is stalled."""

_log = logging.getLogger(__name__)

END_WAIT_S = 10.0
"""Maximum time that a run which ends waits for its last notification."""

CHECK_PERIOD_S = 5.0
"""Seconds between two looks at whether the run is stalled."""

MIN_STEPS = 20
"""Steps before findings are looked for, because the first steps of a run look like many faults."""

Rows = Sequence[Mapping[str, Any]]

Finding = tuple[str, str]
"""The subject of a finding, and its text."""

Findings = Callable[[Rows, Mapping[str, Any]], Sequence[Finding]]
"""Returns the findings on the metrics of all steps and the config of a run."""


class Outbox:
    """Delivers notifications in order. The thread ends with the process, so that nothing keeps it.

    Args:
        deliveries: Deliveries of each notification.
        attempts_after_s: Seconds before each further attempt.
    """

    def __init__(
        self, deliveries: Sequence[NotificationDelivery], *, attempts_after_s: Sequence[float] = ATTEMPTS_AFTER_S
    ) -> None:
        self._deliveries = list(deliveries)
        self._attempts_after_s = attempts_after_s
        self._waiting: queue.Queue[Mapping[str, Any]] = queue.Queue(MAX_WAITING)
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
            _log.warning("a notification (%s) was dropped: %d others wait", notification.get("event"), MAX_WAITING)

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

    def _deliver(self, delivery: NotificationDelivery, notification: Mapping[str, Any]) -> None:
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


class StallWatch:
    """Compares the time since the last step with the usual time between steps, evaluations and saves included. One
    thread notes steps, and another one checks.

    Args:
        multiple: Multiple of the usual time that makes a run stalled.
        clock: Seconds.
    """

    def __init__(self, multiple: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._multiple = multiple
        self._clock = clock
        self._lock = threading.Lock()
        self._gaps_s: deque[float] = deque(maxlen=USUAL_OF)
        self._last: float | None = None
        self._is_noted = False

    def start(self) -> None:
        """Note that the first step begins; how long it may take is not known."""
        with self._lock:
            self._last = self._clock()
            self._gaps_s.clear()
            self._is_noted = False

    def note_step(self) -> None:
        """Note that a step is complete."""
        with self._lock:
            now = self._clock()
            if self._last is not None:
                self._gaps_s.append(now - self._last)
            self._last = now
            self._is_noted = False

    def stop(self) -> None:
        """Note that the run makes no further steps."""
        with self._lock:
            self._last = None

    def check(self) -> tuple[float, float] | None:
        """Return the seconds since the last step and the usual ones if the run is stalled and that was not returned
        since its last step.
        """
        with self._lock:
            if self._last is None or not self._gaps_s or self._is_noted:
                return None
            usual_s, passed_s = median(self._gaps_s), self._clock() - self._last
            self._is_noted = passed_s > max(MIN_S, self._multiple * usual_s)
            return (passed_s, usual_s) if self._is_noted else None


class Notifications(RunObserver):
    """Sends the events that a config chooses. Slow work is done in two threads of its own.

    Args:
        config: The section `logger.notify`.
        findings: Further alarms, from the metrics of all steps; called in a thread of its own.
        restarts: Returns True if the run is restored after an error, which then is not its end.
        outbox: Delivers the notifications.
    """

    def __init__(
        self,
        config: NotifyConfig,
        *,
        findings: Findings = lambda rows, config: (),
        restarts: Callable[[], bool] = lambda: False,
        outbox: Outbox | None = None,
    ) -> None:
        self._config = config
        self._findings = findings
        self._restarts = restarts
        self._outbox = outbox or Outbox(deliveries(config))
        self._stall = StallWatch(config.stalled_after)
        self._run: ObservedRun | None = None
        self._step = self._max_steps = 0
        self._has_started = False
        self._lost = ""
        self._rows: list[Mapping[str, Any]] = []
        self._alarmed: set[str] = set()
        self._num_judged = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, run: ObservedRun) -> None:
        self._run, self._step = run, run.step
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="notification-checks", daemon=True)
            self._thread.start()

    def start(self, max_steps: int, history: Rows) -> None:
        self._max_steps = max_steps
        self._rows = list(history)
        # A second start in this process counts too, which may be from the beginning.
        if self._step or self._has_started:
            self.send("resumed", self._lost)
        self._has_started, self._lost = True, ""
        self._stall.start()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._stall.note_step()
        if step >= self._max_steps:
            # the last save may take longer than a step
            self._stall.stop()
        row = {"step": step, **{name: value for name, value in metrics.items() if not name.startswith(PREFIX)}}
        odd = sorted(name for name, value in row.items() if not math.isfinite(value))
        # The rows of metrics.jsonl have null in these places.
        self._rows.append(row | dict.fromkeys(odd))
        if odd:
            self._alarm(f"not finite: {odd[0]}", f"not a finite number: {', '.join(odd)}")

    def end(self, state: RunEnd) -> None:
        self._stall.stop()
        self._step, self._max_steps = state.step, state.max_steps or self._max_steps
        if state.status == "failed" and self._restarts():
            self._lost = state.reason
        else:
            self.send(state.status, state.reason)

    def close(self) -> None:
        """Wait briefly until everything is delivered."""
        self._closed.set()
        self._outbox.finish(END_WAIT_S)

    def send(self, event: Event, reason: str) -> None:
        """Send an event of the run, if it was chosen."""
        run = self._run
        if run is None or event not in self._config.events:
            return
        reason = reason.partition("\n")[0]
        place = f"step {self._step} of {self._max_steps}" if self._max_steps else "its start"
        self._outbox.send(
            {
                "event": event,
                "text": f"{run.name}: {event} at {place}{f': {reason}' if reason else ''}",
                "run": run.name,
                "run_dir": str(run.run_dir),
                "step": self._step,
                "max_steps": self._max_steps,
                "reason": reason,
                "host": socket.gethostname(),
                "at": datetime.now().astimezone().isoformat(timespec="seconds"),
            }
        )

    def check(self) -> None:
        """Look for a stall and for findings; called from time to time in a thread of its own."""
        stalled = self._stall.check()
        if stalled is not None:
            passed_s, usual_s = stalled
            self.send("stalled", f"no step for {passed_s:.0f} s; the usual time is {usual_s:.0f} s")
        run, rows = self._run, list(self._rows)
        if run is not None and len(rows) >= MIN_STEPS and len(rows) != self._num_judged:
            self._num_judged = len(rows)
            for subject, text in self._findings(rows, run.config):
                self._alarm(subject, text)

    def _alarm(self, subject: str, text: str) -> None:
        """Send an alarm once for each subject."""
        if subject not in self._alarmed:
            self._alarmed.add(subject)
            self.send("alarm", text)

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_PERIOD_S):
            try:
                self.check()
            except Exception as error:  # noqa: BLE001  # the next look may succeed
                _log.debug("no look at the run: %s: %s", type(error).__name__, error)


class DeliveryError(Exception):
    """A notification was not delivered. Its text contains no secret.

    Args:
        text: Why.
        is_final: True if another attempt would fail, too.
    """

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class NotificationDelivery(Protocol):
    """One way to notify somebody."""

    def __str__(self) -> str:
        """Name for the log, without secrets."""

    def deliver(self, notification: Mapping[str, Any]) -> None:
        """Deliver a notification; raises `DeliveryError`."""


class WebhookDelivery:
    """POSTs JSON to a URL, and follows no redirection.

    Args:
        url: The webhook, which may contain a secret.
        timeout_s: Timeout of an attempt.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_NoRedirection())

    def __str__(self) -> str:
        return f"the webhook at {urlsplit(self._url).hostname}"

    def deliver(self, notification: Mapping[str, Any]) -> None:
        body = json.dumps(notification).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "rl-launch"}
        try:
            request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
            with self._opener.open(request, timeout=self._timeout_s) as response:
                response.read(1)
        except urllib.error.HTTPError as error:
            error.close()
            is_final = 300 <= error.code < 500 and error.code not in (408, 425, 429)
            raise DeliveryError(f"it answered {error.code}", is_final=is_final) from None
        except urllib.error.URLError as error:
            raise DeliveryError(f"no connection: {_without(self._url, str(error.reason))}") from None
        except (OSError, ValueError) as error:
            raise DeliveryError(f"{type(error).__name__}: {_without(self._url, str(error))}") from None


class CommandDelivery:
    """Runs a program with JSON on its standard input.

    Args:
        arguments: Program and arguments.
        timeout_s: Time limit in seconds; then it is killed with its children.
    """

    def __init__(self, arguments: Sequence[str], *, timeout_s: float) -> None:
        self._arguments = list(arguments)
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        # arguments may hold secrets
        return f"the command {self._arguments[0]}"

    def deliver(self, notification: Mapping[str, Any]) -> None:
        variables = {f"RL_{name.upper()}": str(value) for name, value in notification.items()}
        try:
            # a session of its own: Ctrl-C in the terminal is not meant for it
            process = subprocess.Popen(
                self._arguments,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
        except OSError as error:
            raise DeliveryError(f"it was not started: {error.strerror}", is_final=True) from None
        try:
            process.communicate(json.dumps(notification), timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise DeliveryError(f"it took longer than {self._timeout_s:g} s") from None
        if process.returncode:
            raise DeliveryError(f"its exit code is {process.returncode}")


def deliveries(config: NotifyConfig) -> list[NotificationDelivery]:
    """Return the deliveries that a config chooses."""
    found: list[NotificationDelivery] = []
    if config.url:
        found.append(WebhookDelivery(config.url, timeout_s=config.timeout_s))
    if config.command:
        found.append(CommandDelivery(config.command, timeout_s=config.timeout_s))
    return found


def check_command(config: NotifyConfig) -> None:
    """Refuse a program that does not exist.

    Raises:
        ConfigError: naming it.
    """
    if config.command and shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"logger.notify.command: {config.command[0]} is not a program on PATH. Pass a list of the program and its "
            "arguments, such as [/home/me/notify.sh, --quiet]"
        )


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Takes a redirection as an error, because following it would turn the POST into a GET without its body."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _without(url: str, text: str) -> str:
    """Return a message without the URL, or its part after the host."""
    parts = urlsplit(url)
    for secret in (url, parts.path + (f"?{parts.query}" if parts.query else ""), parts.path, parts.query):
        if len(secret) > 1:
            text = text.replace(secret, "...")
    return text
