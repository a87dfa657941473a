"""Plans by which environments are built, from their specs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys

from rl_core.errors import WorkerEnvironmentError
from rl_core.install_command import install_command
from rl_launch.worker_envs.checkout import Checkout, find_checkout
from rl_launch.worker_envs.node_build import EnvPlan, base_python
from rl_launch.worker_envs.pins import by_name, export, selection, shipped_export, shipped_pins
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec
from rl_launch.worker_envs.wheel import Wheel, installed_wheel, is_from_index

COMPILED = ("flash-attn", "transformer-engine-torch")
"""Packages that indexes provide only as sources. They are compiled against the installed torch."""

BUILD_TOOLS = ("setuptools", "wheel", "ninja", "packaging", "psutil", "pybind11")
"""Packages needed to compile them, in addition to the compilers of the machine."""


def local_plan(spec: WorkerEnvSpec) -> EnvPlan:
    """The plan for the driver's own node: with a checkout's sources, if there is one."""
    checkout = find_checkout()
    if checkout is not None and checkout.has(spec.wanted):
        return _synced(spec, checkout)
    return portable_plan(spec)


def portable_plan(spec: WorkerEnvSpec) -> EnvPlan:
    """A plan for any node: pinned versions from package indexes, and wheels of the driver's code.

    Raises:
        WorkerEnvironmentError: If a distribution is not installed in the driver's environment.
    """
    checkout = find_checkout()
    ours = tuple(each for each in spec.wanted if _is_ours(each, checkout))
    others = tuple(each for each in spec.wanted if each not in ours)
    pins, compiled = _split(export(checkout.root, ours) if checkout else _shipped(ours))
    wheels = [_wheel(name) for name in _own_distributions(ours)]
    named, carried = _other_requirements(others)
    files = {
        "pins.txt": pins.encode(),
        "compiled.txt": compiled.encode(),
        **{f"wheels/{each.file_name}": each.content for each in (*wheels, *carried)},
    }
    install = ("{uv}", "pip", "install", "--quiet", "--no-compile-bytecode", "--python", "{env_python}")
    commands = [
        ("{uv}", "venv", "--quiet", "--no-project", "--python", "{python}", "{env}"),
        (*install, "--no-deps", "--require-hashes", "-r", "{files}/pins.txt"),
        # made from the driver's own files, which no lock has hashes of
        (*install, "--no-deps", *(f"{{files}}/wheels/{each.file_name}" for each in wheels)),
    ]
    if compiled:
        commands.append((*install, "--constraints", "{files}/pins.txt", *BUILD_TOOLS))
        commands.append(
            (*install, "--no-deps", "--no-build-isolation", "--require-hashes", "-r", "{files}/compiled.txt")
        )
    if others:
        commands.append((*install, "--constraints", "{files}/pins.txt", *named))
    return _plan(
        spec, tuple(commands), [pins, compiled, *(each.content for each in (*wheels, *carried)), *named], files=files
    )


def _split(pins: str) -> tuple[str, str]:
    """Return the requirement lines to install first, and the lines of packages that are compiled against them."""
    compiled = {line for name, lines in by_name(pins).items() if name in COMPILED for line in lines}
    lines = pins.splitlines(keepends=True)
    return (
        "".join(line for line in lines if line.strip() not in compiled),
        "".join(line for line in lines if line.strip() in compiled),
    )


def _synced(spec: WorkerEnvSpec, checkout: Checkout) -> EnvPlan:
    sync = ("{uv}", "sync", "--quiet", "--frozen", "--no-dev", "--no-compile-bytecode", "--python", "{python}")
    projects = [checkout.members[name].joinpath("pyproject.toml").read_bytes() for name in sorted(checkout.members)]
    return _plan(
        spec,
        ((*sync, *selection(spec.wanted)),),
        [str(checkout.root), checkout.lock.read_bytes(), *projects],
        variables={"UV_PROJECT_ENVIRONMENT": "{env}"},
        cwd=str(checkout.root),
    )


def _plan(
    spec: WorkerEnvSpec,
    commands: tuple[tuple[str, ...], ...],
    contents: list[str | bytes],
    *,
    files: dict[str, bytes] | None = None,
    variables: dict[str, str] | None = None,
    cwd: str = "",
) -> EnvPlan:
    minor = "{}.{}".format(*sys.version_info[:2])
    ray = importlib.metadata.version("ray")
    digest = hashlib.sha256(json.dumps([commands, minor, base_python(minor), ray, spec.imports]).encode())
    for content in contents:
        digest.update(hashlib.sha256(content.encode() if isinstance(content, str) else content).digest())
    return EnvPlan(
        name=spec.name,
        digest=digest.hexdigest(),
        commands=commands,
        python=minor,
        ray=ray,
        imports=spec.imports,
        files=files or {},
        variables=variables or {},
        cwd=cwd,
    )


def _is_ours(wanted: Wanted, checkout: Checkout | None) -> bool:
    if checkout:
        return wanted.distribution in checkout.members
    return shipped_export(wanted.distribution) is not None


def _own_distributions(wanted: tuple[Wanted, ...]) -> list[str]:
    """This project's packages that these need, themselves and rl-core included."""
    return sorted({*(each.distribution for each in wanted), "rl-core"})


def _shipped(wanted: tuple[Wanted, ...]) -> str:
    pins = shipped_pins(wanted)
    if pins is None:
        lacking = next(w for w in wanted if any(shipped_export(w.distribution, extra) is None for extra in w.extras))
        raise WorkerEnvironmentError(
            f"rl-launch {importlib.metadata.version('rl-launch')} has no tested versions for {lacking}"
        )
    return pins


def _wheel(distribution: str) -> Wheel:
    try:
        return installed_wheel(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise WorkerEnvironmentError(
            f"{distribution} is not installed in the driver's environment: {install_command(distribution)}"
        ) from None


def _other_requirements(others: tuple[Wanted, ...]) -> tuple[list[str], list[Wheel]]:
    """Packages of third parties: by name and the driver's version if an index has them, else as wheels."""
    named: list[str] = []
    carried: list[Wheel] = []
    for each in others:
        try:
            found = importlib.metadata.distribution(each.distribution)
        except importlib.metadata.PackageNotFoundError:
            raise WorkerEnvironmentError(
                f"{each.distribution} is not installed in the driver's environment: "
                f"{install_command(each.distribution)}"
            ) from None
        if is_from_index(found):
            named.append(f"{each}=={found.version}")
        else:
            wheel = _wheel(each.distribution)
            carried.append(wheel)
            named.append(f"{each} @ file://{{files}}/wheels/{wheel.file_name}")
    return named, carried
