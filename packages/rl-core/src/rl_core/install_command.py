"""The command that installs what is missing into the environment of this process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")


def install_command(requirement: str) -> str:
    """Return a command for a shell that installs a requirement into this environment, with what to know about it in
    brackets: by pip, or by uv in an environment that has no pip. A package of this project that is not installed here
    comes from the checkout that the others are installed from, as it is not on package indexes.

    Args:
        requirement: As pip takes it, such as `rl-envs[reasoning-gym]`.
    """
    checkout = _checkout()
    name, bracket, extras = requirement.partition("[")
    folder = checkout and checkout / "packages" / name
    if folder and folder.is_dir():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            requirement = f"{folder}{bracket}{extras}"
    quoted = f"'{requirement}'" if re.search(r"[\[\s<>=]", requirement) else requirement
    command = _installer().format(quoted)
    if not os.access(sys.prefix, os.W_OK):
        return f"{command} (as the owner of {sys.prefix}, or in the image that it is part of)"
    if checkout is not None and (checkout / ".venv").resolve() == Path(sys.prefix).resolve():
        return f"{command} (this is a checkout: uv sync removes it again, uv sync --inexact does not)"
    return command


def extras_with(distribution: str, module: str) -> list[str]:
    """Return the extras of an installed distribution that bring a module; empty if none does.

    Args:
        distribution: Name of the distribution, such as `rl-megatron`.
        module: Name of the module at the top level, such as `torch`.
    """
    return sorted({extra for extra, name in _of_extras(distribution) if name.split("-")[0] == module.lower()})


def _of_extras(distribution: str) -> Iterator[tuple[str, str]]:
    """Yield the extras of a distribution with the distributions that they bring, also indirectly."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for text in requirements:
        if (match := _REQUIREMENT.match(text)) is None or (extra := _EXTRA.search(match[3] or "")) is None:
            continue
        yield extra[1], match[1].lower()
        if match[2] and match[1] != distribution:
            further = {each.strip() for each in match[2].split(",")}
            yield from ((extra[1], name) for each, name in _of_extras(match[1]) if each in further)


def _installer() -> str:
    """Return a command with a placeholder for requirements, that installs into this environment from any shell."""
    if find_spec("pip") is not None:
        pip = shutil.which("pip")
        is_first = pip is not None and Path(pip).parent.resolve() == Path(sys.executable).parent.resolve()
        return "pip install {}" if is_first else f"{sys.executable} -m pip install {{}}"
    own = Path(sys.executable).with_name("uv")
    uv = "uv" if shutil.which("uv") or not own.exists() else str(own)
    active = os.environ.get("VIRTUAL_ENV")
    # `uv run` activates an environment only for the program that it runs, not for the shell.
    is_active = active is not None and "UV_RUN_RECURSION_DEPTH" not in os.environ
    if is_active and Path(str(active)).resolve() == Path(sys.prefix).resolve():
        return f"{uv} pip install {{}}"
    return f"{uv} pip install {{}} --python {sys.executable}"


def _checkout() -> Path | None:
    """Return the root of the uv workspace that this package is installed from; None if it is not."""
    try:
        url = json.loads(importlib.metadata.distribution("rl-core").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    folders = Path(unquote(urlparse(str(url.get("url", ""))).path)).parents
    return next((folder for folder in folders if (folder / "uv.lock").is_file()), None)
