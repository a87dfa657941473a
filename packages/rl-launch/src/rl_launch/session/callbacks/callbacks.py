"""Calls of a run's callbacks. An error in one never costs the run its work."""

from __future__ import annotations

import logging
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl_core.callback import CallbackRun, RunEnd
from rl_core.errors import CallbackFailed
from rl_core.user_code import limited, raised_at
from rl_launch.session.callbacks.callback_classes import MadeCallback

_logger = logging.getLogger(__name__)

_EVALUATIONS = ("val/", "eval/")

TIME = "time/callbacks"
"""Metric of the seconds that a step's hooks took."""


class Callbacks:
    """Several callbacks as one, called in the order of the config.

    One that raises anything, or takes longer than its limit, is reported with file and line. With `on_error: warn` it
    is then turned off; with `on_error: stop` the run ends after the step, saved, and `failure` is what it ends with.

    Args:
        callbacks: Callbacks of the run.
        unwound_by: Returns the signal that ends the run at once, which is raised in a hook like an error of the hook.
    """

    def __init__(
        self, callbacks: Sequence[MadeCallback] = (), unwound_by: Callable[[], object | None] = lambda: None
    ) -> None:
        self._callbacks = list(callbacks)
        self._unwound_by = unwound_by
        self._run: CallbackRun | None = None
        self.failure: CallbackFailed | None = None

    def start(self, run: CallbackRun) -> None:
        """Call `on_start`."""
        self._run = run
        for each in tuple(self._callbacks):
            each.callback.run = run
            self._call(each, "on_start", f"before step {run.step + 1}", run)

    def with_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call `on_evaluation`, if the metrics have an evaluation, and `on_step`.

        Args:
            step: Step; 0 has an evaluation only.
            metrics: Metrics of the step.

        Returns:
            The metrics with those that the callbacks have added.
        """
        found = dict(metrics)
        started = time.monotonic()
        evaluated = {name: value for name, value in metrics.items() if name.startswith(_EVALUATIONS)}
        if evaluated:
            self._add(found, "on_evaluation", step, evaluated)
        if step:
            self._add(found, "on_step", step, None)
            if any(each.hooks & {"on_step", "on_evaluation"} for each in self._callbacks):
                found[TIME] = time.monotonic() - started
        return found

    def saved(self, step: int, path: Path) -> None:
        """Call `on_save`."""
        for each in tuple(self._callbacks):
            self._call(each, "on_save", f"at step {step}", step, path)

    def end(self, state: RunEnd) -> None:
        """Call `on_end`, if the run has started."""
        if self._run is None:
            return
        for each in tuple(self._callbacks):
            self._call(each, "on_end", f"after step {state.step}", state)

    def _add(self, found: dict[str, float], hook: str, step: int, metrics: Mapping[str, float] | None) -> None:
        for each in tuple(self._callbacks):
            shown = MappingProxyType(dict(found if metrics is None else metrics))
            found |= self._call(each, hook, f"at step {step}", step, shown, known=found)

    def _call(
        self, each: MadeCallback, hook: str, when: str, *arguments: Any, known: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Call a hook that the callback overrides, and return the metrics that it adds."""
        if hook not in each.hooks:
            return {}
        before = self._unwound_by()
        try:
            with limited(each.config.timeout_s):
                returned = getattr(each.callback, hook)(*arguments)
            return {} if known is None or returned is None else _checked(returned, known)
        except BaseException as error:
            # a run that ends already has the interpreter's own handlers of signals
            if self._unwound_by() is not before or (before and isinstance(error, KeyboardInterrupt)):
                raise
            # code of the user's, whose failure, even SystemExit, must not cost the run
            self._fail(each, hook, when, error)
            return {}

    def _fail(self, each: MadeCallback, hook: str, when: str, error: BaseException) -> None:
        self._callbacks.remove(each)
        place = raised_at(error)
        said = f"callback {each.config.type} failed in {hook} {when}{f', {place}' if place else ''}"
        what = f"{type(error).__name__}: {error}"
        _logger.debug("%s", said, exc_info=error)
        if each.config.on_error == "stop" and hook != "on_end":
            self.failure = self.failure or CallbackFailed(f"{said}: {what}")
            assert self._run is not None
            self._run.stop(said)
        else:
            _logger.warning("%s, and is turned off (%s)", said, what)


def _checked(returned: Any, known: Mapping[str, float]) -> dict[str, float]:
    """Return metrics that a hook has returned as plain numbers.

    Raises:
        TypeError, ValueError: If they are not metrics, or the step has one of the names.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(f"a hook must return metrics by name, or None; got {type(returned).__name__}")
    for name, value in returned.items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise TypeError(f"a metric must be a number with a name; got {name!r}: {value!r}")
        if name in known:
            raise ValueError(f"the step already has a metric {name}. Choose another name")
    return {name: float(value) for name, value in returned.items()}
