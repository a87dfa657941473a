"""Findings of a section, sent as they are made so that none is lost with the process that made them."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

RUNS = "runs to its end"
"""Oracle of a check that raised."""

Verdict = Literal["ok", "off", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Args:
        subject: the thing that was checked.
        oracle: the reference of the comparison.
        found: the difference, or the result.
        trace: traceback of the exception, for the appendix.
    """

    subject: str
    oracle: str
    verdict: Verdict
    found: str
    trace: str = ""


@dataclass(frozen=True)
class Figures:
    """A table of measurements."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Speed:
    """A measurement beside what was expected.

    Args:
        subject: The thing that was measured.
        unit: Unit of both numbers; more is better.
        found: The measurement.
        expected: The expectation; None if nothing is known of this device.
        basis: Source of the expectation.
    """

    subject: str
    unit: str
    found: float
    expected: float | None
    basis: str


@dataclass(frozen=True)
class Begun:
    """A check that is under way, which is named if it never ends."""

    subject: str


Entry = Finding | Figures | Speed | Begun


class Skip(Exception):
    """Raised if a check cannot be made here, with the reason."""


class Report:
    """Receives the findings of a section.

    Args:
        emit: takes each entry at once.
        release: frees device memory that a failed check leaves behind.
    """

    def __init__(self, emit: Callable[[Entry], None], release: Callable[[], None]) -> None:
        self._emit = emit
        self._release = release

    def within(self, subject: str, oracle: str, error: float, bound: float) -> None:
        """Report an error, which may be as large as the bound; NaN is off."""
        verdict: Verdict = "ok" if error <= bound else "off"
        self._emit(Finding(subject, oracle, verdict, f"{error:.3g} (at most {bound:.3g})"))

    def holds(self, subject: str, oracle: str, is_so: bool, found: str) -> None:
        """Report whether a condition holds."""
        self._emit(Finding(subject, oracle, "ok" if is_so else "off", found))

    def skip(self, subject: str, why: str) -> None:
        """Report a check that is not made."""
        self._emit(Finding(subject, "", "skipped", why))

    def figures(self, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Report measurements without a verdict."""
        self._emit(Figures(caption, tuple(head), tuple(tuple(row) for row in rows)))

    def speed(self, subject: str, unit: str, found: float, expected: float | None, basis: str) -> None:
        """Report a measurement for the table of expected values."""
        self._emit(Speed(subject, unit, found, expected, basis))

    @contextmanager
    def attempt(self, subject: str) -> Iterator[None]:
        """Report a check that raises as failed, and continue."""
        self._emit(Begun(subject))
        try:
            yield
        except Skip as skipped:
            self.skip(subject, str(skipped))
            _forget(skipped)
            self._release()
        except Exception as error:  # noqa: BLE001  # becomes a line of the report
            self._emit(failure_of(subject, error))
            _forget(error)
            self._release()


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Yield the messages of a logger as they come, warnings included."""
    found: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _forget(error: BaseException) -> None:
    """Release the tensors that an exception's frames hold."""
    for cause in (error, error.__context__):
        if cause is not None:
            traceback.clear_frames(cause.__traceback__)
    gc.collect()


def failure_of(subject: str, error: BaseException) -> Finding:
    """Return an exception as a finding: its last line, and the traceback for the appendix."""
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return Finding(subject, RUNS, "failed", last, "".join(traceback.format_exception(error)))
