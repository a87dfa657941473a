"""A limit of processor time for one verdict."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

CPU_S = 2.0
"""Seconds of processor time for one verdict, without the import of sympy."""


class OutOfTime(BaseException):
    """The limit has passed. Not an `Exception`, because libraries catch those and continue."""


@contextmanager
def outside_of_limit() -> Iterator[None]:
    """Do something that a limit does not count and must not interrupt, such as an import: half of a module stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, left)


def within(cpu_s: float, compute: Callable[[], T]) -> T | None:
    """Return a result, or None if it takes too much processor time.

    The limit holds only in the main thread, where an environment's process computes.
    """
    if threading.current_thread() is not threading.main_thread():
        return compute()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        try:
            return compute()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    except OutOfTime:
        return None
    finally:
        signal.signal(signal.SIGVTALRM, before)
