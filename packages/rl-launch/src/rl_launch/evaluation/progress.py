"""The progress of an evaluation: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rl_launch.run_session.tracking.progress import duration

SECONDS_PER_LINE = 10.0
"""Least time between two lines of the log."""

_log = logging.getLogger(__name__)


class EvaluationProgress:
    """Shows how many prompts are done, their mean reward and the time that is left.

    Args:
        total: Number of prompts.
        done: Prompts that were done before, with the sum of their mean rewards.
        console: Shows the bar, if it is a terminal.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, total: int, done: int, reward: float, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._before, self._done, self._reward = total, done, done, reward
        self._clock = clock
        self._started = self._told_at = clock()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=total, completed=done)
        self._is_live = console.is_terminal and not console.is_dumb_terminal

    def __enter__(self) -> EvaluationProgress:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._bar.stop()

    def advance(self, reward: float) -> None:
        """Count a prompt, with its mean reward."""
        self._done += 1
        self._reward += reward
        self._bar.update(self._task, completed=self._done, description=self.text())
        if not self._is_live and (self._clock() - self._told_at >= SECONDS_PER_LINE or self._done == self._total):
            self._told_at = self._clock()
            _log.info("%d/%d prompts  %s", self._done, self._total, self.text())

    def text(self) -> str:
        """Return mean reward so far and the time that is left."""
        here = self._done - self._before
        each = (self._clock() - self._started) / max(here, 1)
        return f"mean {self._reward / max(self._done, 1):.4g}  {duration(each * (self._total - self._done))} left"
