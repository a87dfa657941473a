"""The check that the driver's own environment can run a worker."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator

from packaging.requirements import Requirement

from rl_core.plugins import KINDS
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec, normalised


def project_distributions() -> list[str]:
    """Return the names of the installed packages of this project, with those that offer plugins."""
    entries = [entry for group in KINDS for entry in importlib.metadata.entry_points(group=group)]
    offering = {entry.dist.name for entry in entries if entry.dist is not None}
    return sorted({"rl-core", "rl-launch", *offering})


def missing(spec: WorkerEnvSpec) -> list[str]:
    """Requirements of a worker of this spec that the running interpreter lacks, in words."""
    problems: list[str] = []
    seen: set[Wanted] = set()
    for wanted in spec.wanted:
        problems.extend(_unmet(wanted, seen))
    if not problems:
        problems.extend(f"the module {name} is missing" for name in spec.imports if not importable(name))
    return problems


def _unmet(wanted: Wanted, seen: set[Wanted]) -> Iterator[str]:
    """Return requirements that are missing or have another version, including required extras."""
    if wanted in seen:
        return
    seen.add(wanted)
    try:
        distribution = importlib.metadata.distribution(wanted.distribution)
    except importlib.metadata.PackageNotFoundError:
        yield f"{wanted} is not installed"
        return
    offered = {normalised(extra) for extra in distribution.metadata.get_all("Provides-Extra") or ()}
    for extra in sorted({normalised(extra) for extra in wanted.extras} - offered):
        yield f"{wanted.distribution} {distribution.version} has no extra {extra!r}"
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if applies(requirement, wanted.extras):
            yield from _check(requirement, str(wanted), seen)


def _check(requirement: Requirement, asker: str, seen: set[Wanted]) -> Iterator[str]:
    name = normalised(requirement.name)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        yield f"{asker} needs {requirement.name}, which is not installed"
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield f"{asker} needs {requirement.name}{requirement.specifier}, but {version} is installed"
    elif requirement.extras:
        yield from _unmet(Wanted(name, tuple(sorted(requirement.extras))), seen)


def applies(requirement: Requirement, extras: tuple[str, ...]) -> bool:
    """Return whether a distribution that is installed with these extras has this requirement on this machine."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def importable(module: str) -> bool:
    """Return whether a module is installed, whose packages may be missing as well."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
