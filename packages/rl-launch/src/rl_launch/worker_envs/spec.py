"""The contents that a worker's environment must have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rl_core.plugins import Requirement

ROLLOUT_WORKER = Requirement("rl-algos", {"cpu": ("torch",), "cuda": ("torch",)}, ("rl_algos",))
"""The rollout worker itself; with torch, which every engine has, so that it shares the environment of a trainer."""

_HOST = Requirement("rl-core", {"cpu": ("ray",), "cuda": ("ray",)}, ("ray",))


@dataclass(frozen=True, order=True)
class Wanted:
    """A distribution with its extras.

    Args:
        distribution: Normalised name.
        extras: Sorted.
    """

    distribution: str
    extras: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.distribution}[{','.join(self.extras)}]" if self.extras else self.distribution


@dataclass(frozen=True)
class WorkerEnvSpec:
    """An environment of a worker.

    Args:
        wanted: Distributions, the one whose name the environment has first; each once.
        imports: Modules that must be importable there, sorted.
    """

    wanted: tuple[Wanted, ...]
    imports: tuple[str, ...]

    @property
    def name(self) -> str:
        """Short name, for folders and logs: `rl-vllm.cpu`."""
        return ".".join((self.wanted[0].distribution, *self.wanted[0].extras))

    def covers(self, other: WorkerEnvSpec) -> bool:
        """Return whether a worker of `other` can run here and would not find any engine other than its own."""
        mine = {wanted.distribution: set(wanted.extras) for wanted in self.wanted}
        return (
            self.wanted[0] == other.wanted[0]
            and all(w.distribution in mine and set(w.extras) <= mine[w.distribution] for w in other.wanted)
            and set(other.imports) <= set(self.imports)
        )


def worker_env(requirement: Requirement, extras_for: str, *, also: Iterable[Requirement] = ()) -> WorkerEnvSpec:
    """Return the environment of a worker: its own requirement, ray and the worker hosts, and the code sent to it.

    Args:
        requirement: Requirement of the worker class.
        extras_for: `Device.extras` of the run's device.
        also: Requirements of the code that is sent to it: losses, rollout programs.
    """
    extras: dict[str, set[str]] = {}
    imports: set[str] = set()
    for each in (requirement, *also, _HOST):
        extras.setdefault(normalised(each.distribution), set()).update(each.extras.get(extras_for, ()))
        imports.update(each.imports)
    wanted = tuple(Wanted(name, tuple(sorted(names))) for name, names in extras.items())
    return WorkerEnvSpec(wanted, tuple(sorted(imports)))


def normalised(distribution: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
