"""Tells somebody when the state of a run changes."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rl_core.callback import RunEnd
from rl_launch.monitoring.delivery import deliveries
from rl_launch.monitoring.outbox import Outbox
from rl_launch.monitoring.readings import PREFIX
from rl_launch.monitoring.stall import StallWatch
from rl_launch.session.monitoring_config import Event, NotifyConfig
from rl_launch.session.observer import ObservedRun, RunObserver

_log = logging.getLogger(__name__)

END_WAIT_S = 10.0
"""Maximum time that a run which ends waits for its last notification."""

CHECK_PERIOD_S = 5.0
"""Seconds between two looks at whether the run is stalled."""

FEWEST_STEPS = 20
"""Steps before findings are looked for, because the first steps of a run look like many faults."""

Rows = Sequence[Mapping[str, Any]]
Finding = tuple[str, str]
"""What a finding is about, and its text."""

Findings = Callable[[Rows, Mapping[str, Any]], Sequence[Finding]]
"""Returns the findings on the metrics of all steps and the config of a run."""


def no_findings(rows: Rows, config: Mapping[str, Any]) -> Sequence[Finding]:
    """Return nothing."""
    return ()


class Notifications(RunObserver):
    """Sends the events that a config chooses; what takes time happens in two threads of its own.

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
        findings: Findings = no_findings,
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
        # of a second start in this process, too, which may be from the beginning
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
        # as the rows of metrics.jsonl have it
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
        if run is not None and len(rows) >= FEWEST_STEPS and len(rows) != self._num_judged:
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
