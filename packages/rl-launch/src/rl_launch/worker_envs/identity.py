"""Comparison of an environment on another node with the driver's."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

from rl_launch.worker_envs.driver import applies
from rl_launch.worker_envs.node_build import EnvIdentity
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec, normalised


def identity_of(spec: WorkerEnvSpec) -> EnvIdentity:
    """The parts of an environment of this spec that must equal the driver's: modules, the versions of its
    distributions' requirements, and the sources of the packages themselves.
    """
    distributions = {name for wanted in spec.wanted for name in (wanted.distribution, *_asked_by(wanted))}
    packages = {wanted.distribution.replace("-", "_") for wanted in spec.wanted}
    return EnvIdentity(spec.imports, tuple(sorted(distributions)), tuple(sorted(packages)))


def _asked_by(wanted: Wanted) -> set[str]:
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(wanted.distribution) or ()]
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {normalised(each.name) for each in requirements if applies(each, wanted.extras)}
