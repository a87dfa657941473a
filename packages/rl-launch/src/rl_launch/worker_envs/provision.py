"""Environments for a run's workers, on the driver's node."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from rl_core.errors import WorkerEnvironmentError
from rl_core.install_command import install_command
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.node_build import BuiltEnv, EnvBuildError, EnvPlan, build, find_uv
from rl_launch.worker_envs.plan import local_plan
from rl_launch.worker_envs.spec import WorkerEnvSpec

Mode = Literal["auto", "shared", "isolated"]

_logger = logging.getLogger(__name__)


def provision(
    specs: Iterable[WorkerEnvSpec], mode: Mode = "auto", *, root: str | None = None
) -> dict[WorkerEnvSpec, str]:
    """The Python interpreter for each spec, its environment built if there is none.

    Environments are built at the same time, once per node; a log line reports each.

    Args:
        specs: Environments that workers need; duplicates are built once.
        mode: `auto` takes the driver's own environment if everything is importable there at versions that fit, and
            builds one otherwise; `shared` takes the driver's or fails; `isolated` always builds.
        root: Folder of the environments; `RL_HOME` or the user's cache folder if unset.

    Raises:
        WorkerEnvironmentError: If one cannot be built or lacks something that workers need.
    """
    wanted = list(dict.fromkeys(specs))
    lacking = {spec: missing(spec) for spec in wanted} if mode != "isolated" else {}
    here = [spec for spec in wanted if mode != "isolated" and not lacking[spec]]
    if mode == "shared" and len(here) < len(wanted):
        raise WorkerEnvironmentError(_unshared({spec: lacking[spec] for spec in wanted if spec not in here}))
    for spec in here:
        _logger.info("environment %s: the driver's own", spec.name)
    to_build = [spec for spec in wanted if spec not in here]
    return {**dict.fromkeys(here, sys.executable), **_built(to_build, root)}


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
    """For each spec, the one whose environment it uses: another's if that covers it."""
    specs = list(dict.fromkeys(specs))
    largest = sorted(specs, key=lambda spec: -sum(1 + len(wanted.extras) for wanted in spec.wanted))
    return {spec: next(other for other in largest if other.covers(spec)) for spec in specs}


def _built(specs: list[WorkerEnvSpec], root: str | None) -> dict[WorkerEnvSpec, str]:
    if not specs:
        return {}
    if root is None:
        check_home()
    home = homes(specs)
    # called once before there are threads: it reads `sysconfig`, whose table Python 3.11 fills without a lock
    _uv()
    plans = {spec: local_plan(spec) for spec in dict.fromkeys(home.values())}
    with ThreadPoolExecutor(max_workers=len(plans)) as pool:
        futures = {spec: pool.submit(_build, plan, root) for spec, plan in plans.items()}
    built = {spec: future.result() for spec, future in futures.items()}
    return {spec: built[home[spec]].python for spec in specs}


def _uv() -> str:
    try:
        return find_uv()
    except EnvBuildError as error:
        raise WorkerEnvironmentError(f"worker environments cannot be built: {error}") from None


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
        raise WorkerEnvironmentError(
            f"environment {plan.name} cannot be written: {error}. "
            "Set RL_HOME to a folder with space that you may write to."
        ) from None
    _logger.info("environment %s: %s", plan.name, "cached" if built.cached else f"built in {built.seconds:.0f} s")
    return built


def _unshared(lacking: dict[WorkerEnvSpec, list[str]]) -> str:
    lines = [f"{spec.name}: {problem}" for spec, problems in lacking.items() for problem in problems]
    installs = sorted({str(wanted) for spec in lacking for wanted in spec.wanted if wanted.extras})
    return "\n".join(
        [
            "cluster.worker_envs is `shared`, but the driver's environment lacks packages that workers need:",
            *(f"  {line}" for line in lines),
            *(f"  {install_command(each)}" for each in installs),
            "Install them by these commands, or use cluster.worker_envs=auto.",
        ]
    )
