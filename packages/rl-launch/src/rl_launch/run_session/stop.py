"""Requests to end a run before its last step."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StepAbandoned(BaseException):
    """Leaves the step in progress of a run that was asked to end: the session saves the last complete step.

    Args:
        why: The event that the step waits for, which may never come.
    """


class StopRequest:
    """True if a signal, a time limit or the loop has asked to end after the step in progress.

    A second signal ends the process at once.

    Attributes:
        reason: Why the run ends after the step in progress; empty if nothing has asked for that.
        signal: The signal that asked for it, if one did.
        unwound_by: The signal that ended the run at once, if one did: the second, or one without a step to finish.

    Args:
        limit_s: Time limit in seconds for the run with its last save; None for no limit.
        since: Start of that time, by `time.monotonic`; now if not given.
    """

    def __init__(self, limit_s: float | None = None, since: float | None = None) -> None:
        self.reason = ""
        self.signal: signal.Signals | None = None
        self.unwound_by: signal.Signals | None = None
        self._num_taken = 0
        self._limit_s = limit_s
        self._started = time.monotonic() if since is None else since
        self._longest_step_s = 0.0
        self._longest_save_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._is_graceful = self._is_interactive = self._is_interrupted = False
        self._num_held = 0

    def listen(self, *, gracefully: bool) -> None:
        """Take over SIGTERM and SIGINT; only the main thread can.

        Args:
            gracefully: A signal asks for the end after the step; otherwise, with no step to finish, it unwinds at once.
        """
        self._is_graceful = gracefully
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
            self._previous = self._previous or found

    def interrupt_statements(self) -> None:
        """Have SIGINT interrupt the statement in progress, as in any notebook, and leave the run as it is."""
        self.listen(gracefully=False)
        self._is_interactive = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Enter a context that an interrupt of a statement does not tear apart: it is raised when the context is left,
        or by `is_asked_by_signal` within it. The second one is raised at once."""
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1
            if not self._num_held:
                self.is_asked_by_signal()

    def is_asked_by_signal(self) -> bool:
        """Return whether a signal has asked for the end.

        Raises:
            KeyboardInterrupt: If a `held` context has kept an interrupt.
        """
        if self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt
        return self.signal is not None

    def unlisten(self) -> None:
        """Restore the earlier handlers of the signals."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def ask(self, reason: str) -> None:
        """End after the step in progress; the first reason stands."""
        self.reason = self.reason or reason

    def is_ending(self, num_signals: int) -> bool:
        """Return whether the run ends at once, or this process has not taken all of these signals yet."""
        return self.unwound_by is not None or num_signals > self._num_taken

    def why_unwound(self, error: BaseException, *, has_begun: bool) -> str:
        """Return why the run ended without finishing its step.

        Args:
            error: The exception that ended it.
            has_begun: Whether steps could be made.
        """
        if self.unwound_by is None:
            return self.reason or type(error).__name__
        if self.signal is not None:
            return f"{self.reason}, then {self.unwound_by.name} ended it immediately"
        return f"{self.unwound_by.name} {'as it ended' if has_begun else 'while it started'}"

    def after_step(self, seconds: float, *, saves: bool = False) -> None:
        """Ask for the end if another step and the save after it may not fit into the time that is left.

        Args:
            seconds: Duration of the completed step.
            saves: True if an earlier save is still under way, which that one waits for.
        """
        self._longest_step_s = max(self._longest_step_s, seconds)
        if self._limit_s is None:
            return
        left = self._limit_s - (time.monotonic() - self._started)
        if left < 1.2 * self._longest_step_s + (3 if saves else 2) * self._longest_save_s:
            self.ask(f"checkpointing.checkpoint_must_save_by leaves {max(left, 0):.0f} s")

    def after_save(self, seconds: float) -> None:
        """Learn how long a save takes."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._num_taken += 1
        if self._is_interactive and number == signal.SIGINT:
            if self._num_held and not self._is_interrupted:
                self._is_interrupted = True
                return
            self._is_interrupted = False
            raise KeyboardInterrupt
        if self.reason or not self._is_graceful:
            self.unwound_by = signal.Signals(number)
            self.unlisten()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.signal = signal.Signals(number)
        self.ask(name)
        _logger.warning("%s: the run ends after this step; a second signal ends it immediately", name)
