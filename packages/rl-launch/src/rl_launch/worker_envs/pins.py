"""Locked versions of everything that is not this project's own, per distribution and extra.

`locks/` holds exports of the workspace's lock, so that an installation without a checkout gets the versions that were
tested together: some sets (vLLM's CPU build) resolve only with the workspace's overrides. Each line ends with the
hashes of the files that may be installed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from rl_launch.worker_envs.node_build import clean_environment, find_uv
from rl_launch.worker_envs.spec import Wanted, normalised

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARM, _X86 = (f"(platform_machine == '{machine}' and sys_platform == 'linux')" for machine in ("aarch64", "x86_64"))
_EVERYWHERE = f"{_ARM} or {_X86}"


def shipped_pins(wanted: Iterable[Wanted]) -> str | None:
    """Requirement lines for these distributions together; None if one of them is not of this workspace.

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
    """The shipped export of one distribution with one extra (or none); None if there is no such export."""
    resource = files("rl_launch.worker_envs") / "locks" / export_name(distribution, extra)
    return resource.read_text(encoding="utf-8") if resource.is_file() else None


def export_name(distribution: str, extra: str = "") -> str:
    """File name of an export."""
    return f"{distribution}.{extra}.txt" if extra else f"{distribution}.txt"


def export(workspace: Path, wanted: Iterable[Wanted]) -> str:
    """Requirement lines for these distributions together from a checkout's lock, without its members."""
    command = [
        find_uv(),
        "export",
        "--quiet",
        "--frozen",
        "--no-dev",
        "--no-emit-workspace",
        "--no-header",
        "--no-annotate",
    ]
    command += selection(wanted)
    done = subprocess.run(command, cwd=workspace, env=clean_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"uv export failed in {workspace}:\n{done.stderr}")
    # hashes are on lines of their own, continued from the requirement's
    lines = re.sub(r"(?<! ) *\\\n *", " ", done.stdout).splitlines()
    return "".join(f"{_plain(line)}\n" for line in lines if line.strip())


def selection(wanted: Iterable[Wanted]) -> list[str]:
    """Options of uv that select these members of a workspace and their extras."""
    wanted = list(wanted)
    extras = sorted({extra for each in wanted for extra in each.extras})
    return [*(f"--package={each.distribution}" for each in wanted), *(f"--extra={extra}" for extra in extras)]


def by_name(text: str) -> dict[str, list[str]]:
    """Requirement lines by the package they pin: one that depends on the Python version has several."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        found = _NAME.match(line)
        if found:
            lines.setdefault(normalised(found[0]), []).append(line)
    return lines


def without_hashes(line: str) -> str:
    """Return the requirement of a line: name, version and marker."""
    return line.partition(" --hash=")[0]


def _plain(line: str) -> str:
    """The line without a marker that only names the platforms of this project."""
    requirement, *hashes = line.split(" --hash=")
    version, _, marker = requirement.partition(" ; ")
    return " --hash=".join([version if marker.strip() == _EVERYWHERE else requirement, *hashes])
