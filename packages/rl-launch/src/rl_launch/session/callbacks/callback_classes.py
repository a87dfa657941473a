"""The classes of a run's callbacks: found and checked before the start, then instantiated."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from pydantic import ValidationError

from rl_core.callback import HOOKS, Callback
from rl_core.config import Config, Problem, did_you_mean, nearest_as_remedy, section_of, settings_of
from rl_core.errors import ConfigError
from rl_core.plugins import resolve
from rl_core.user_code import FromFile, is_in_file, limited, raised_at
from rl_launch.session.config import CallbackConfig


class _NoKeys(Config):
    """Base of the settings of a callback."""


@dataclass(frozen=True)
class MadeCallback:
    """A callback of a run.

    Args:
        key: Key of the config that names it.
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
        except BaseException as error:  # even SystemExit, of which a user would see nothing
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
        raise ValueError(f"{name} is not a subclass of rl_core.Callback. Write class {_last(name)}(Callback)")
    unknown = [each for each in dir(kind) if each.startswith("on_") and each not in HOOKS and _is_method(kind, each)]
    if unknown:
        raise ValueError(
            f"{name} has a method {unknown[0]}, which is not a hook{did_you_mean(unknown[0], HOOKS)}; hooks: "
            f"{', '.join(HOOKS)}"
        )
    if not _overridden(kind):
        raise ValueError(f"{name} does not override a hook, so it would have no effect; hooks: {', '.join(HOOKS)}")
    for hook in _overridden(kind):
        _check_signature(kind, hook)
    return kind


def _is_method(kind: type, name: str) -> bool:
    return inspect.isroutine(getattr(kind, name))


def _overridden(kind: type[Callback]) -> list[str]:
    return [hook for hook in HOOKS if getattr(kind, hook) is not getattr(Callback, hook)]


def _check_signature(kind: type[Callback], hook: str) -> None:
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


def _last(name: str) -> str:
    return name.rpartition(":")[2].rpartition(".")[2]
