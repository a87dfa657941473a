"""The callbacks of a run: they are checked before the start, created, and called.

An error in one never costs the run its work.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rl_core import resolve
from rl_core.config import Config, Problem, did_you_mean, nearest_as_remedy, section_of, settings_of
from rl_core.errors import CallbackFailed, ConfigError
from rl_core.run import HOOKS, Callback, CallbackRun, RunEnd
from rl_core.user_code import FromFile, is_in_file, limited, raised_at
from rl_launch.run_session.config import CallbackConfig

_logger = logging.getLogger(__name__)

_EVALUATIONS = ("val/", "eval/")

TIME = "time/callbacks"
"""Metric of the seconds that a step's hooks took."""


class _NoKeys(Config):
    """Base of the settings of a callback."""


@dataclass(frozen=True)
class MadeCallback:
    """A callback of a run.

    Args:
        key: Its key in the config.
        config: Its section.
        callback: The instance.
    """

    key: str
    config: CallbackConfig
    callback: Callback

    @property
    def hooks(self) -> frozenset[str]:
        """Hooks that its class overrides."""
        return frozenset(_overridden(type(self.callback)))


def callback_problems(config: Any) -> Iterator[Problem]:
    """Yield problems of the callbacks of a resolved config: files, names, hooks and settings."""
    for index, entry in enumerate(config.callbacks):
        key, section = f"callbacks[{index}]", CallbackConfig.of(entry)
        try:
            kind = callback_class(section.type)
        except (ValueError, ImportError) as error:
            yield Problem(key if isinstance(entry, str) else f"{key}.type", str(error))
            continue
        yield from (
            problem.at(f"{key}.settings{problem.key and '.'}{problem.key}")
            for problem in _settings_problems(kind, section)
        )


def make_callbacks(entries: Sequence[str | CallbackConfig]) -> list[MadeCallback]:
    """Return the callbacks of a config that `callback_problems` finds nothing wrong with."""
    made = []
    for index, section in enumerate(map(CallbackConfig.of, entries)):
        kind = callback_class(section.type)
        settings = settings_of(_settings_type(kind).model_validate(section.settings))
        key = f"callbacks[{index}]"
        try:
            with limited(section.timeout_s):
                made.append(MadeCallback(key, section, kind(**settings)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user would see nothing of a SystemExit
            place = raised_at(error)
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{key}: no instance of {section.type} could be created{f' ({place})' if place else ''}: {what}"
            ) from error
    return made


def callback_class(name: str) -> type[Callback]:
    """Return the class of a callback.

    Args:
        name: `file.py:Class` or `package.module:Class`.

    Raises:
        ValueError: If there is no such class, or it is not a callback with valid hooks.
        ModuleNotFoundError: If its package is not installed.
    """
    if is_in_file(name):
        FromFile.read(name)  # its error lists what the file defines if the name is wrong
    kind = resolve(name)
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        last = name.rpartition(":")[2].rpartition(".")[2]
        raise ValueError(f"{name} is not a subclass of rl_core.Callback. Write class {last}(Callback)")
    unknown = [
        each
        for each in dir(kind)
        if each.startswith("on_") and each not in HOOKS and inspect.isroutine(getattr(kind, each))
    ]
    if unknown:
        raise ValueError(
            f"{name} has a method {unknown[0]}, which is not a hook{did_you_mean(unknown[0], HOOKS)}; hooks: "
            f"{', '.join(HOOKS)}"
        )
    if not _overridden(kind):
        raise ValueError(f"{name} does not override a hook, so it would have no effect; hooks: {', '.join(HOOKS)}")
    for hook in _overridden(kind):
        written, wanted = getattr(kind, hook), list(inspect.signature(getattr(Callback, hook)).parameters)
        if inspect.iscoroutinefunction(written):
            raise ValueError(f"{kind.__name__}.{hook} is async, but callbacks must be plain methods. Remove `async`")
        try:
            inspect.signature(written).bind(*wanted)
        except TypeError:
            raise ValueError(
                f"{kind.__name__}.{hook}{inspect.signature(written)} cannot be called with the arguments of a run. "
                f"Write def {hook}({', '.join(wanted)})"
            ) from None
    return kind


def _overridden(kind: type[Callback]) -> list[str]:
    return [hook for hook in HOOKS if getattr(kind, hook) is not getattr(Callback, hook)]


def _settings_type(kind: type[Callback]) -> type[Config]:
    if not is_dataclass(kind):
        parameters = inspect.signature(kind).parameters.values()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        if positional:
            raise ValueError(
                f"{kind.__name__} takes {', '.join(positional)} by position. Make its settings keyword-only parameters "
                "with types, as in def __init__(self, *, patience: int = 3)"
            )
    return section_of(kind, _NoKeys)


def _settings_problems(kind: type[Callback], section: CallbackConfig) -> Iterator[Problem]:
    try:
        settings = _settings_type(kind)
        settings.model_validate(section.settings)
    except ValidationError as error:
        for each in error.errors():
            key = ".".join(map(str, each["loc"]))
            if each["type"] == "extra_forbidden":
                known = list(settings.model_fields)
                remedy = nearest_as_remedy(key, known) if known else "Remove this key"
                reason = f"is not a setting of {kind.__name__}{'' if known else ', which has none'}"
                yield Problem(key, reason, allowed=", ".join(known), remedy=remedy)
            elif each["type"] == "missing":
                yield Problem(key, "must be set")
            else:
                yield Problem(key, each["msg"][:1].lower() + each["msg"][1:], got=each["input"])
    except ValueError as error:
        yield Problem("", str(error))
    else:
        if inspect.isabstract(kind):
            yield Problem("", f"{kind.__name__} has abstract methods, so no instance of it can be created")


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
            return {}


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
