"""Errors that cross process boundaries.

Every class here pickles without the environment it was raised in, so the driver can read the failure of a worker whose
libraries it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.problems import Problem


class RLError(Exception):
    """Base class of all errors that this project raises intentionally."""


class ConfigError(RLError, ValueError):
    """A configuration that cannot be run; its message has the key, where it was set and what is allowed."""


class ConfigProblems(ConfigError):
    """A configuration with problems of single keys, all of them.

    Args:
        message: Lists every problem: its key, where it was set and what is allowed.
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
    """Data in which the position of a checkpoint means nothing, because they are not those that it was saved in."""


class RunDirectoryError(RLError):
    """A run directory that is foreign, busy, changed or damaged; its message says which, and what to do."""


class CheckpointDamaged(RLError):
    """A checkpoint that cannot be loaded; its message has the file that is missing or differs."""


class WorkerEnvironmentError(RLError):
    """A worker's environment that cannot be built or does not import what the worker needs."""


class WeightSyncError(RLError):
    """Weights did not arrive completely: a tensor is missing, extra, stale or corrupt, or a phase timed out.

    Args:
        message: What went wrong, in one line.
        tensors: Names of the tensors at fault; empty if no single one is.
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message, tensors)
        self.tensors = tensors

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


class RolloutsFailed(RLError):
    """More rollouts failed than the run allows; its message counts the reasons."""


class CallbackFailed(RLError):
    """A callback that raised and ends the run; its message has the hook, the step, the file and the line."""


@dataclass(frozen=True)
class Origin:
    """Where in the run a failure happened: the role and rank of the worker, its node, and what it was doing.

    Args:
        section: Dotted key of the config section of a model, to which keys in its workers' messages are relative; empty
            for workers that are not a model's.
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
    """A failure inside a worker, as plain text: type name, message and traceback of the error it stands for.

    Args:
        kind: Qualified name of the original exception class.
        message: Its text.
        traceback: Its formatted traceback.
        origin: Where it happened, once known.
    """

    def __init__(self, kind: str, message: str, traceback: str, origin: Origin | None = None) -> None:
        super().__init__(kind, message, traceback, origin)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.origin = origin

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        return f"{where}{self.kind}: {self.message}"

    def at(self, origin: Origin) -> WorkerError:
        """The same failure with its origin filled in."""
        return WorkerError(self.kind, self.message, self.traceback, origin)


class PeerFailed(RLError):
    """Another rank failed in a collective operation; raised on the ranks that did not fail."""


class WorkerDied(RLError):
    """A worker's process ended without an answer (killed, out of memory, crashed in native code)."""

    def __init__(self, message: str, origin: Origin | None = None) -> None:
        super().__init__(message, origin)
        self.origin = origin

    def __str__(self) -> str:
        return f"{self.origin}: {self.args[0]}" if self.origin else str(self.args[0])


class WorkerStalled(WorkerDied):
    """A worker did not answer in time, or made no progress; it is treated as dead."""
