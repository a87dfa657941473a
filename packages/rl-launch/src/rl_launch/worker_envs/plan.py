"""Plans for building environments: pinned versions, wheels of the driver's code, or a checkout's sources.

`locks/` holds exports of the workspace's lock, so that an installation without a checkout gets the versions that were
tested together: some sets (vLLM's CPU build) resolve only with the workspace's overrides. Each line ends with the
hashes of the files that may be installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from rl_core.errors import WorkerEnvironmentError
from rl_core.install_command import install_command
from rl_launch.worker_envs.node_build import EnvPlan, base_python, clean_environment, find_uv
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec, normalised
from rl_launch.worker_envs.wheel import installed_wheel, source_folder

COMPILED = ("flash-attn", "transformer-engine-torch")
"""Packages that indexes provide only as sources, as in `tool.uv.extra-build-dependencies` of the workspace. They are
compiled against the installed torch."""

BUILD_TOOLS = ("setuptools", "wheel", "ninja", "packaging", "psutil", "pybind11")
"""Packages needed to compile them, in addition to the compilers of the machine."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARM, _X86 = (f"(platform_machine == '{machine}' and sys_platform == 'linux')" for machine in ("aarch64", "x86_64"))
_EVERYWHERE = f"{_ARM} or {_X86}"


def members_of(workspace: Path) -> dict[str, Path]:
    """Return the folders of a uv workspace's packages by distribution name."""
    patterns = tomllib.loads((workspace / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    folders = sorted(folder for pattern in patterns for folder in workspace.glob(pattern))
    projects = [folder / "pyproject.toml" for folder in folders if (folder / "pyproject.toml").is_file()]
    return {tomllib.loads(file.read_text())["project"]["name"]: file.parent for file in projects}


def find_checkout() -> Path | None:
    """Return the root of the workspace that rl-launch is installed from in editable mode; None if it is not."""
    folder = source_folder(importlib.metadata.distribution("rl-launch"))
    for candidate in (folder, *folder.parents) if folder is not None else ():
        project = candidate / "pyproject.toml"
        if not (candidate / "uv.lock").is_file() or not project.is_file():
            continue
        if "workspace" in tomllib.loads(project.read_text()).get("tool", {}).get("uv", {}):
            return candidate
    return None


def local_plan(spec: WorkerEnvSpec) -> EnvPlan:
    """Return the plan for the driver's own node: with a checkout's sources, if there is one."""
    checkout = find_checkout()
    members = members_of(checkout) if checkout is not None else {}
    if checkout is None or any(each.distribution not in members for each in spec.wanted):
        return portable_plan(spec)
    sync = ("{uv}", "sync", "--quiet", "--frozen", "--no-dev", "--no-compile-bytecode", "--python", "{python}")
    projects = [(members[name] / "pyproject.toml").read_bytes() for name in sorted(members)]
    contents = [str(checkout), (checkout / "uv.lock").read_bytes(), *projects]
    variables = {"UV_PROJECT_ENVIRONMENT": "{env}"}
    return _plan(spec, ((*sync, *_selection(spec.wanted)),), contents, variables=variables, cwd=str(checkout))


def portable_plan(spec: WorkerEnvSpec) -> EnvPlan:
    """Return a plan for any node: pinned versions from package indexes, and wheels of the driver's code.

    Raises:
        WorkerEnvironmentError: If a distribution is not installed in the driver's environment.
    """
    checkout = find_checkout()
    if checkout is not None:
        members = members_of(checkout)
        ours = [each for each in spec.wanted if each.distribution in members]
        lines = export(checkout, ours).splitlines(keepends=True)
    else:
        ours = [each for each in spec.wanted if shipped_export(each.distribution) is not None]
        pinned = shipped_pins(ours)
        if pinned is None:
            lacking = next(w for w in ours if any(shipped_export(w.distribution, extra) is None for extra in w.extras))
            version = importlib.metadata.version("rl-launch")
            raise WorkerEnvironmentError(f"rl-launch {version} has no tested versions for {lacking}")
        lines = pinned.splitlines(keepends=True)
    others = [each for each in spec.wanted if each not in ours]
    # packages that are compiled against the others are installed after them
    sources = {line for name, found in by_name("".join(lines)).items() if name in COMPILED for line in found}
    pins = "".join(line for line in lines if line.strip() not in sources)
    compiled = "".join(line for line in lines if line.strip() in sources)
    own = sorted({*(each.distribution for each in ours), "rl-core"})
    for name in (*own, *(each.distribution for each in others)):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            remedy = install_command(name)
            raise WorkerEnvironmentError(f"{name} is not installed in the driver's environment: {remedy}") from None
    wheels = [installed_wheel(name) for name in own]
    # packages of third parties: by name and the driver's version if an index has them, else as wheels
    named, carried = [], []
    for each in others:
        found = importlib.metadata.distribution(each.distribution)
        if not json.loads(found.read_text("direct_url.json") or "{}"):
            named.append(f"{each}=={found.version}")
        else:
            carried.append(installed_wheel(each.distribution))
            named.append(f"{each} @ file://{{files}}/wheels/{carried[-1].file_name}")
    install = ("{uv}", "pip", "install", "--quiet", "--no-compile-bytecode", "--python", "{env_python}")
    commands = [
        ("{uv}", "venv", "--quiet", "--no-project", "--python", "{python}", "{env}"),
        (*install, "--no-deps", "--require-hashes", "-r", "{files}/pins.txt"),
        # made from the driver's own files, so no lock has their hashes
        (*install, "--no-deps", *(f"{{files}}/wheels/{each.file_name}" for each in wheels)),
    ]
    if compiled:
        hashed = ("--no-deps", "--no-build-isolation", "--require-hashes", "-r", "{files}/compiled.txt")
        commands += [(*install, "--constraints", "{files}/pins.txt", *BUILD_TOOLS), (*install, *hashed)]
    if others:
        commands.append((*install, "--constraints", "{files}/pins.txt", *named))
    written = {"pins.txt": pins.encode(), "compiled.txt": compiled.encode()}
    written |= {f"wheels/{each.file_name}": each.content for each in (*wheels, *carried)}
    contents = [pins, compiled, *(each.content for each in (*wheels, *carried)), *named]
    return _plan(spec, tuple(commands), contents, files=written)


def shipped_pins(wanted: Iterable[Wanted]) -> str | None:
    """Return requirement lines for these distributions together; None if one of them is not of this workspace.

    Extras that exclude one another are locked separately, so a package may have different versions there. The versions
    of the first distribution, whose engine is needed, win.
    """
    chosen: dict[str, list[str]] = {}
    for each in wanted:
        for extra in each.extras or ("",):
            text = shipped_export(each.distribution, extra)
            if text is None:
                return None
            for name, lines in by_name(text).items():
                chosen.setdefault(name, lines)
    return "".join(f"{line}\n" for name in sorted(chosen) for line in chosen[name])


def shipped_export(distribution: str, extra: str = "") -> str | None:
    """Return the shipped export of one distribution with one extra (or none); None if there is no such export."""
    resource = files("rl_launch.worker_envs") / "locks" / export_name(distribution, extra)
    return resource.read_text(encoding="utf-8") if resource.is_file() else None


def export_name(distribution: str, extra: str = "") -> str:
    """Return the file name of an export."""
    return f"{distribution}.{extra}.txt" if extra else f"{distribution}.txt"


def export(workspace: Path, wanted: Iterable[Wanted]) -> str:
    """Return requirement lines for these distributions together from a checkout's lock, without its members."""
    options = ("--quiet", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--no-annotate")
    command = [find_uv(), "export", *options, *_selection(wanted)]
    done = subprocess.run(command, cwd=workspace, env=clean_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"uv export failed in {workspace}:\n{done.stderr}")
    exported = []
    # hashes are on lines of their own, continued from the requirement's
    for line in re.sub(r"(?<! ) *\\\n *", " ", done.stdout).splitlines():
        requirement, *hashes = line.split(" --hash=")
        version, _, marker = requirement.partition(" ; ")
        # a marker of the platforms of this project is always true
        exported.append(" --hash=".join([version if marker.strip() == _EVERYWHERE else requirement, *hashes]))
    return "".join(f"{line}\n" for line in exported if line.strip())


def by_name(text: str) -> dict[str, list[str]]:
    """Return requirement lines by the package they pin. One that depends on the Python version has several."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := _NAME.match(line):
            lines.setdefault(normalised(found[0]), []).append(line)
    return lines


def _selection(wanted: Iterable[Wanted]) -> list[str]:
    """Return the options of uv that select these members of a workspace and their extras."""
    wanted = list(wanted)
    extras = sorted({extra for each in wanted for extra in each.extras})
    return [*(f"--package={each.distribution}" for each in wanted), *(f"--extra={extra}" for extra in extras)]


def _plan(spec: WorkerEnvSpec, commands: tuple[tuple[str, ...], ...], contents: list[Any], **further: Any) -> EnvPlan:
    """Return the plan of commands.

    Args:
        spec: The environment.
        commands: See `EnvPlan`.
        contents: Strings and bytes that decide the contents of the environment, in addition to the commands.
        further: Fields of `EnvPlan` that differ from their defaults.
    """
    minor = "{}.{}".format(*sys.version_info[:2])
    ray = importlib.metadata.version("ray")
    digest = hashlib.sha256(json.dumps([commands, minor, base_python(minor), ray, spec.imports]).encode())
    for content in contents:
        digest.update(hashlib.sha256(content.encode() if isinstance(content, str) else content).digest())
    return EnvPlan(spec.name, digest.hexdigest(), commands, minor, ray, spec.imports, **further)
