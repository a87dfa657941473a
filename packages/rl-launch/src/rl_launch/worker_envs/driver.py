"""The driver's own environment: whether it can run a worker, and the parts of it that other nodes must equal."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import suppress

from packaging.requirements import Requirement

from rl_core.plugins import KINDS
from rl_launch.worker_envs.node_build import EnvIdentity
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec, normalised


def project_distributions() -> list[str]:
    """Return the installed distributions of this project, and those that offer plugins."""
    entries = [entry for group in KINDS for entry in importlib.metadata.entry_points(group=group)]
    return sorted({"rl-core", "rl-launch", *(entry.dist.name for entry in entries if entry.dist is not None)})


def identity_of(spec: WorkerEnvSpec) -> EnvIdentity:
    """Return the parts of an environment of this spec that must equal the driver's: modules, the versions of its
    distributions' requirements, and the sources of the packages themselves.
    """
    distributions = {wanted.distribution for wanted in spec.wanted}
    for wanted in spec.wanted:
        with suppress(importlib.metadata.PackageNotFoundError):
            needed = requirements_of(importlib.metadata.requires(wanted.distribution), wanted.extras)
            distributions |= {normalised(each.name) for each in needed}
    packages = {wanted.distribution.replace("-", "_") for wanted in spec.wanted}
    return EnvIdentity(spec.imports, tuple(sorted(distributions)), tuple(sorted(packages)))


def missing(spec: WorkerEnvSpec) -> list[str]:
    """Return the requirements of a worker of this spec that the running interpreter lacks, in words."""
    seen: set[Wanted] = set()
    problems = [problem for wanted in spec.wanted for problem in _unmet(wanted, seen)]
    return problems or [f"the module {name} is missing" for name in spec.imports if not importable(name)]


def _unmet(wanted: Wanted, seen: set[Wanted]) -> Iterator[str]:
    """Yield the requirements that are missing or have another version, including required extras."""
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
    for requirement in requirements_of(distribution.requires, wanted.extras):
        name = normalised(requirement.name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{wanted} needs {requirement.name}, which is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{wanted} needs {requirement.name}{requirement.specifier}, but {version} is installed"
        elif requirement.extras:
            yield from _unmet(Wanted(name, tuple(sorted(requirement.extras))), seen)


def requirements_of(texts: Iterable[str] | None, extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield the requirements that a distribution with these extras has on this machine.

    Args:
        texts: All requirements of the distribution, as its metadata lists them.
        extras: Extras that it is installed with.
    """
    for requirement in map(Requirement, texts or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def importable(module: str) -> bool:
    """Return whether a module is installed, whose packages may be missing as well."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
