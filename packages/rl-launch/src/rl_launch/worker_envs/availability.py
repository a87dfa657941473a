"""Availability of worker environments, determined without building one."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs.driver import applies, missing
from rl_launch.worker_envs.node_build import EnvBuildError, find_built, find_uv
from rl_launch.worker_envs.pins import by_name, shipped_pins
from rl_launch.worker_envs.plan import local_plan
from rl_launch.worker_envs.provision import Mode, homes
from rl_launch.worker_envs.spec import WorkerEnvSpec, normalised

Status = Literal["driver", "built", "to build", "unavailable"]

_SOURCES = frozenset({"flash-attn", "transformer-engine-torch"})
"""Packages that are published without builds, as in `tool.uv.extra-build-dependencies` of the workspace."""

_MINOR = re.compile(r"\d+\.\d+")
_CUDA = re.compile(r"^cuda\b.*?=\s*(?:'([^']*)'|None)", re.MULTILINE)


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch.

    Args:
        version: Installed, or pinned if it is to be built.
        cuda: CUDA version it was built for, or is pinned with; empty for a build without CUDA, None if not known.
    """

    version: str
    cuda: str | None = None


@dataclass(frozen=True)
class Availability:
    """Source of a worker's environment, and the versions it would have.

    Args:
        status: The driver's own environment, one built earlier, one still to be built, or unavailable.
        packages: Requirements of the worker's engine, versions by name: installed, or pinned if it is to be built.
        torch: The build that the worker would import; None if there is none.
        problem: Why it is unavailable.
        python: Its interpreter; empty if it does not exist yet.
        compiled: Packages that are published as sources and are compiled when the environment is built.
    """

    status: Status
    packages: Mapping[str, str] = field(default_factory=dict)
    torch: TorchBuild | None = None
    problem: str = ""
    python: str = ""
    compiled: tuple[str, ...] = ()


def availability_of(
    specs: Iterable[WorkerEnvSpec], mode: Mode = "auto", *, root: str | None = None
) -> dict[WorkerEnvSpec, Availability]:
    """Return the environment that `provision` with the same arguments would find or build for each spec."""
    wanted = list(dict.fromkeys(specs))
    lacking = {spec: missing(spec) if mode != "isolated" else ["cluster.worker_envs is isolated"] for spec in wanted}
    found = {spec: _installed(spec, "driver", sys.path, sys.executable) for spec in wanted if not lacking[spec]}
    rest = [spec for spec in wanted if lacking[spec]]
    if mode == "shared":
        return found | {spec: Availability("unavailable", problem="; ".join(lacking[spec])) for spec in rest}
    home = homes(rest)
    apart = {spec: _apart(spec, root) for spec in dict.fromkeys(home.values())}
    return found | {spec: apart[home[spec]] for spec in rest}


def _apart(spec: WorkerEnvSpec, root: str | None) -> Availability:
    try:
        plan = local_plan(spec)
        python = find_built(plan, root)
        if python is None:
            find_uv()
    except (WorkerEnvironmentError, EnvBuildError, OSError) as error:
        return Availability("unavailable", problem=str(error))
    if python is not None:
        return _installed(
            spec, "built", [str(Path(python).parents[1] / f"lib/python{plan.python}/site-packages")], python
        )
    pins = by_name(shipped_pins(spec.wanted) or "")
    packages = {name: _pinned(pins[name]) for name in _engine(spec) if name in pins}
    toolkit = _MINOR.match(_pinned(pins["cuda-toolkit"])) if "cuda-toolkit" in pins else None
    torch = TorchBuild(_pinned(pins["torch"]), toolkit and toolkit[0]) if "torch" in pins else None
    return Availability("to build", packages, torch, compiled=tuple(sorted(_SOURCES & pins.keys())))


def _installed(spec: WorkerEnvSpec, status: Status, path: list[str], python: str) -> Availability:
    found = {name: _distribution(name, path) for name in _engine(spec)}
    packages = {name: each.version for name, each in found.items() if each is not None}
    return Availability(status, packages, _torch(_distribution("torch", path)), python=python)


def _engine(spec: WorkerEnvSpec) -> list[str]:
    """Requirements of the distribution that names the environment, next to the others of the spec."""
    first, own = spec.wanted[0], {wanted.distribution for wanted in spec.wanted}
    requirements = [Requirement(text) for text in importlib.metadata.requires(first.distribution) or ()]
    return sorted({normalised(each.name) for each in requirements if applies(each, first.extras)} - own)


def _distribution(name: str, path: list[str]) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name, path=path)), None)


def _pinned(lines: list[str]) -> str:
    return lines[0].partition(" --hash=")[0].partition(" ;")[0].partition("==")[2].strip()


def _torch(installed: importlib.metadata.Distribution | None) -> TorchBuild | None:
    """The build of torch, read from its own file: importing torch takes seconds, and happens in another interpreter."""
    if installed is None:
        return None
    found = _CUDA.search(Path(str(installed.locate_file("torch/version.py"))).read_text())
    return TorchBuild(installed.version, (found[1] or "") if found else None)
