"""Environments for a run's workers, on the driver's node: which exist, and how the others are provided."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from rl_core.errors import WorkerEnvironmentError
from rl_core.install_command import install_command
from rl_launch.worker_envs.driver import missing, requirements_of
from rl_launch.worker_envs.node_build import BuiltEnv, EnvBuildError, EnvPlan, build, find_built, find_uv
from rl_launch.worker_envs.plan import COMPILED, by_name, local_plan, shipped_pins
from rl_launch.worker_envs.spec import WorkerEnvSpec, normalised

Mode = Literal["auto", "shared", "isolated"]
Status = Literal["driver", "built", "to build", "unavailable"]

_MINOR = re.compile(r"\d+\.\d+")
_CUDA = re.compile(r"^cuda\b.*?=\s*(?:'([^']*)'|None)", re.MULTILINE)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverEnvs:
    """Interpreters of a run's workers on the driver's node: built, checked, and able to run the code sent to them.

    Args:
        mode: `cluster.worker_envs`.
        specs: Specs, by role: `policy`, `generation`, `env.<name>`.
        interpreters: Interpreter by role.
    """

    mode: Mode
    specs: Mapping[str, WorkerEnvSpec]
    interpreters: Mapping[str, str]

    @classmethod
    def provided(cls, specs: Mapping[str, WorkerEnvSpec], mode: Mode) -> DriverEnvs:
        """Find or build all of them; raises as `provision`."""
        found = provision(specs.values(), mode)
        return cls(mode, dict(specs), {role: found[spec] for role, spec in specs.items()})


class TorchBuild(NamedTuple):
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


def provision(
    specs: Iterable[WorkerEnvSpec], mode: Mode = "auto", *, root: str | None = None
) -> dict[WorkerEnvSpec, str]:
    """Return the Python interpreter for each spec, whose environment is built if there is none.

    Environments are built at the same time, once per node; a log line reports each.

    Args:
        specs: Environments that workers need; duplicates are built once.
        mode: `auto` takes the driver's own environment if everything is importable there at versions that fit, and
            builds one otherwise; `shared` takes the driver's or fails; `isolated` always builds.
        root: Folder of the environments; `RL_HOME` or the user's cache folder if unset.

    Raises:
        WorkerEnvironmentError: If one cannot be built or lacks something that workers need.
    """
    lacking = _lacking(specs, mode)
    here, to_build = [s for s in lacking if not lacking[s]], [s for s in lacking if lacking[s]]
    if mode == "shared" and to_build:
        lines = [f"  {spec.name}: {problem}" for spec in to_build for problem in lacking[spec]]
        extras = sorted({str(wanted) for spec in to_build for wanted in spec.wanted if wanted.extras})
        raise WorkerEnvironmentError(
            "cluster.worker_envs is `shared`, but the driver's environment lacks packages that workers need:\n"
            + "\n".join([*lines, *(f"  {install_command(each)}" for each in extras)])
            + "\nInstall them by these commands, or use cluster.worker_envs=auto."
        )
    for spec in here:
        _log.info("environment %s: the driver's own", spec.name)
    return {**dict.fromkeys(here, sys.executable), **_built(to_build, root)}


def availability_of(
    specs: Iterable[WorkerEnvSpec], mode: Mode = "auto", *, root: str | None = None
) -> dict[WorkerEnvSpec, Availability]:
    """Return the environment that `provision` with the same arguments would find or build for each spec."""
    lacking = _lacking(specs, mode)
    found = {spec: _installed(spec, "driver", sys.path, sys.executable) for spec in lacking if not lacking[spec]}
    rest = [spec for spec in lacking if lacking[spec]]
    if mode == "shared":
        return found | {spec: Availability("unavailable", problem="; ".join(lacking[spec])) for spec in rest}
    home = homes(rest)
    apart = {spec: _apart(spec, root) for spec in dict.fromkeys(home.values())}
    return found | {spec: apart[home[spec]] for spec in rest}


def check_home() -> None:
    """Refuse a home folder that does not exist, before models, environments of gigabytes or results of checks are kept
    in it. Root could make it, on any disk.

    Raises:
        WorkerEnvironmentError: If neither `RL_HOME` nor `XDG_CACHE_HOME` is set, and there is no home folder.
    """
    home = os.path.expanduser("~")
    if not (os.environ.get("RL_HOME") or os.environ.get("XDG_CACHE_HOME") or os.path.isdir(home)):
        raise WorkerEnvironmentError(
            f"the home folder {home} does not exist. Set HOME, or RL_HOME to a folder with space that you may write to."
        )


def homes(specs: Iterable[WorkerEnvSpec]) -> dict[WorkerEnvSpec, WorkerEnvSpec]:
    """Return for each spec the one whose environment it uses: another's if that covers it."""
    specs = list(dict.fromkeys(specs))
    largest = sorted(specs, key=lambda spec: -sum(1 + len(wanted.extras) for wanted in spec.wanted))
    return {spec: next(other for other in largest if other.covers(spec)) for spec in specs}


def _lacking(specs: Iterable[WorkerEnvSpec], mode: Mode) -> dict[WorkerEnvSpec, list[str]]:
    """Return the reasons why each spec cannot use the driver's own environment."""
    isolated = ["cluster.worker_envs is isolated"]
    return {spec: missing(spec) if mode != "isolated" else isolated for spec in dict.fromkeys(specs)}


def _built(specs: list[WorkerEnvSpec], root: str | None) -> dict[WorkerEnvSpec, str]:
    if not specs:
        return {}
    if root is None:
        check_home()
    home = homes(specs)
    try:
        # called once before there are threads: it reads `sysconfig`, whose table Python 3.11 fills without a lock
        find_uv()
    except EnvBuildError as error:
        raise WorkerEnvironmentError(f"worker environments cannot be built: {error}") from None
    plans = {spec: local_plan(spec) for spec in dict.fromkeys(home.values())}
    with ThreadPoolExecutor(max_workers=len(plans)) as pool:
        futures = {spec: pool.submit(_build, plan, root) for spec, plan in plans.items()}
    built = {spec: future.result().python for spec, future in futures.items()}
    return {spec: built[home[spec]] for spec in specs}


def _build(plan: EnvPlan, root: str | None) -> BuiltEnv:
    started = time.monotonic()
    try:
        built = build(plan, root)
    except EnvBuildError as error:
        raise WorkerEnvironmentError(
            f"environment {plan.name} failed after {time.monotonic() - started:.0f} s: {error}\n"
            "Check the network and the disk and start again, or install the missing packages in the driver's "
            "environment and use cluster.worker_envs=shared."
        ) from None
    except OSError as error:
        remedy = "Set RL_HOME to a folder with space that you may write to."
        raise WorkerEnvironmentError(f"environment {plan.name} cannot be written: {error}. {remedy}") from None
    _log.info("environment %s: %s", plan.name, "cached" if built.cached else f"built in {built.seconds:.0f} s")
    return built


def _apart(spec: WorkerEnvSpec, root: str | None) -> Availability:
    try:
        plan = local_plan(spec)
        python = find_built(plan, root)
        if python is None:
            find_uv()
    except (WorkerEnvironmentError, EnvBuildError, OSError) as error:
        return Availability("unavailable", problem=str(error))
    if python is not None:
        packages = str(Path(python).parents[1] / f"lib/python{plan.python}/site-packages")
        return _installed(spec, "built", [packages], python)
    pins = by_name(shipped_pins(spec.wanted) or "")
    versions = {
        name: lines[0].partition(" --hash=")[0].partition(" ;")[0].partition("==")[2].strip()
        for name, lines in pins.items()
    }
    toolkit = _MINOR.match(versions.get("cuda-toolkit", ""))
    torch = TorchBuild(versions["torch"], toolkit and toolkit[0]) if "torch" in versions else None
    engine = {name: versions[name] for name in _engine(spec) if name in versions}
    return Availability("to build", engine, torch, compiled=tuple(sorted({*COMPILED} & pins.keys())))


def _installed(spec: WorkerEnvSpec, status: Status, path: list[str], python: str) -> Availability:
    def distribution(name: str) -> importlib.metadata.Distribution | None:
        return next(iter(importlib.metadata.distributions(name=name, path=path)), None)

    packages = {name: found.version for name in _engine(spec) if (found := distribution(name)) is not None}
    torch = None
    if (installed := distribution("torch")) is not None:
        # read from its own file: importing torch takes seconds, and happens in another interpreter
        cuda = _CUDA.search(Path(str(installed.locate_file("torch/version.py"))).read_text())
        torch = TorchBuild(installed.version, (cuda[1] or "") if cuda else None)
    return Availability(status, packages, torch, python=python)


def _engine(spec: WorkerEnvSpec) -> list[str]:
    """Return the requirements of the first distribution of an environment, without the others of the spec."""
    first, own = spec.wanted[0], {wanted.distribution for wanted in spec.wanted}
    needed = requirements_of(importlib.metadata.requires(first.distribution), first.extras)
    return sorted({normalised(each.name) for each in needed} - own)
