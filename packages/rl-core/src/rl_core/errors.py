"""Errors that cross process boundaries, and the problems of config keys in their messages.

Every class here pickles without the environment it was raised in, so the driver can read the failure of a worker whose
libraries it does not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

_LONGEST_SHOWN = 60


class _NotGiven(Enum):
    NOT_GIVEN = "no value"


NOT_GIVEN = _NotGiven.NOT_GIVEN
"""The value of a problem that is not about a value."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with one key. Tests compare the fields, so the wording may change.

    `Problem("loss_fn.clip", "must not exceed clip_max (0.2)", got=0.5, remedy="Lower it")` reads
    `got 0.5: must not exceed clip_max (0.2). Lower it`. The origin of the key is added when the problem is reported.

    Args:
        key: Dotted key from the root (in `ProblemError`: from the section that raises it); empty for the whole.
        reason: The fault, as a clause whose subject is the key or its value.
        got: The value that was found, if the value matters.
        allowed: The values that are accepted, if they can be listed or described in a few words.
        remedy: What to do, as one or more sentences without the last full stop.
        is_unused: True if the key has no effect with the rest of the config, so removing it changes nothing.
        feature: The feature that the key asks for, if it is not offered.
    """

    key: str
    reason: str = ""
    _: KW_ONLY
    got: Any = NOT_GIVEN
    allowed: str = ""
    remedy: str = ""
    is_unused: bool = False
    feature: str = ""

    @classmethod
    def unused(cls, key: str, condition: str, *, remedy: str = "Remove this key") -> Problem:
        """Return the problem of a key that has no effect.

        Args:
            key: Path of the key, such as `loss_fn.span_tau`.
            condition: When it has none, such as `with loss_fn.kl.weight=0`.
            remedy: Advice that follows the problem in the message.
        """
        return cls(key, f"has no effect {condition}", remedy=remedy, is_unused=True)

    @property
    def message(self) -> str:
        """The value, the reason, what is allowed and the remedy, in one line without the key."""
        given = "" if self.got is NOT_GIVEN else f"got {show(self.got)}"
        wrong = ": ".join(filter(None, (given, self.reason)))
        clauses = filter(None, (wrong, self.allowed and f"allowed: {self.allowed}"))
        return ". ".join(filter(None, ("; ".join(clauses), self.remedy)))

    def at(self, key: str) -> Problem:
        """Return the same problem at another key."""
        return replace(self, key=key)

    def rewritten(self, rewrite: Callable[[str], str]) -> Problem:
        """Return the problem with each of its strings, and the value as it is shown, passed through a function."""
        shown = self.got if self.got is NOT_GIVEN else show(self.got)
        new = shown if shown is NOT_GIVEN else rewrite(shown)
        return replace(
            self,
            reason=rewrite(self.reason),
            got=self.got if new == shown else _Written(new),
            allowed=rewrite(self.allowed),
            remedy=rewrite(self.remedy),
        )


class _Written(str):
    """A value as a message shows it, without quotes."""


def show(value: Any) -> str:
    """Return a value as YAML would write it on one line, cut if it is long."""
    text = value if isinstance(value, _Written) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


class RLError(Exception):
    """Base class of all errors that this project raises intentionally."""


class ConfigError(RLError, ValueError):
    """A configuration that cannot be run; its message has the key, its origin and the allowed values."""


class ConfigProblems(ConfigError):
    """A configuration with problems of single keys, all of them.

    Args:
        message: Lists every problem: its key, its origin and the allowed values.
        problems: Each problem, with its key from the root.
    """

    def __init__(self, message: str, problems: Sequence[Problem]) -> None:
        super().__init__(message, tuple(problems))
        self.problems: tuple[Problem, ...] = tuple(problems)

    def __str__(self) -> str:
        return str(self.args[0])


class PluginError(ConfigError):
    """A plugin of an installed package that cannot be used; its message has the entry point and the package."""


class DataError(RLError, ValueError):
    """A dataset or a prompt that cannot be used; its message has the file, the line or row, and the remedy."""


class DataChanged(DataError):
    """Data that differ from the data of a checkpoint, so that its position means nothing."""


class RunDirectoryError(RLError):
    """A run directory that is foreign, busy, changed or damaged; its message has the fault and the remedy."""


class CheckpointDamaged(RLError):
    """A checkpoint that cannot be loaded; its message has the file that is missing or differs."""


class WorkerEnvironmentError(RLError):
    """A worker's environment that cannot be built or does not import what the worker needs."""


class WeightSyncError(RLError):
    """Weights did not arrive completely: a tensor is missing, extra, stale or corrupt, or a phase timed out.

    Args:
        message: What went wrong, in one line.
        tensors: Names of the tensors at fault; empty if no single one is.
        origins: Engines that compute something else with weights that have arrived; empty for any other failure.
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = (), origins: tuple[FailureOrigin, ...] = ()) -> None:
        super().__init__(message, tensors)
        self.tensors = tensors
        self.origins = origins

    def __str__(self) -> str:
        return str(self.args[0])


class GeneratorError(RLError):
    """A generator cannot serve: its engine died, or its weights are incomplete. Its requests may run elsewhere."""


class RequestRefused(GeneratorError):
    """A request that no generator of this config can serve, such as a prompt longer than its context. Only its
    rollout fails.
    """


class EnvironmentTimeout(RLError):
    """An environment call that passed its deadline."""


class EnvironmentFailed(RLError):
    """An environment hung, crashed or raised on one conversation; only that rollout fails."""


class InfrastructureFailed(EnvironmentFailed):
    """The process, the machine or the sandbox of an environment failed, not the conversation. Its rollout begins
    again; an environment may raise it for a service that it needs.
    """


class RolloutsFailed(RLError):
    """More rollouts failed than the run allows; its message counts the reasons."""


class LogprobsDiffer(RLError):
    """Trainer and generator computed other bits for the logprob of a sampled token in an exact run."""


class CallbackFailed(RLError):
    """A callback that raised and ends the run; its message has the hook, the step, the file and the line."""


@dataclass(frozen=True)
class FailureOrigin:
    """Where in the run a failure happened: the role and rank of the worker, its node, and its activity.

    Args:
        section: Dotted key of a model's config section, the base of relative keys in its workers' messages; empty for
            workers that are not a model's.
    """

    role: str
    rank: int
    node: str
    phase: str
    section: str = ""

    def __str__(self) -> str:
        section = f" (config section {self.section})" if self.section not in ("", self.role) else ""
        return f"{self.role}{section} rank {self.rank} on {self.node} during {self.phase}"


class WorkerError(RLError):
    """A failure inside a worker, as plain text: type name, message and traceback of the original error.

    Args:
        kind: Qualified name of the original exception class.
        message: Its text.
        traceback: Its formatted traceback.
        origin: Where it happened, once known.
    """

    def __init__(self, kind: str, message: str, traceback: str, origin: FailureOrigin | None = None) -> None:
        super().__init__(kind, message, traceback, origin)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.origin = origin

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        return f"{where}{self.kind}: {self.message}"

    def at(self, origin: FailureOrigin) -> WorkerError:
        """Return the same failure with its origin filled in."""
        return WorkerError(self.kind, self.message, self.traceback, origin)


class PeerFailed(RLError):
    """Another rank failed in a collective operation; raised on the ranks that did not fail."""


class WorkerDied(RLError):
    """A worker's process ended without an answer (killed, out of memory, crashed in native code)."""

    def __init__(self, message: str, origin: FailureOrigin | None = None) -> None:
        super().__init__(message, origin)
        self.origin = origin

    def __str__(self) -> str:
        return f"{self.origin}: {self.args[0]}" if self.origin else str(self.args[0])


class WorkerStalled(WorkerDied):
    """A worker did not answer in time, or made no progress; it is treated as dead."""


MISSING_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that show that there is no file. All others say nothing about its contents: a later attempt may succeed."""


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Give an error of reading or writing a file the name of the file, which the system leaves out after `open`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def require_readable(path: Path) -> None:
    """Raise the `OSError` of reading a small file, before it is read by what would call it invalid."""
    with named(path):
        path.read_bytes()
