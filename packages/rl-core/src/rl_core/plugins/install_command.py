"""The command that installs a package into the environment of this process, and what keeps it there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse


def install_command(requirement: str) -> str:
    """A command for a shell that installs a requirement here: by pip, or by uv in an environment that has no pip.

    Args:
        requirement: As pip takes it, such as `rl-envs[reasoning-gym]`.
    """
    quoted = f"'{requirement}'" if "[" in requirement else requirement
    if find_spec("pip") is not None:
        return f"pip install {quoted}"
    active = os.environ.get("VIRTUAL_ENV")
    is_active = active is not None and Path(active).resolve() == Path(sys.prefix).resolve()
    return f"uv pip install {quoted}{'' if is_active else f' --python {sys.executable}'}"


def install_advice(requirement: str) -> str:
    """The command of `install_command`, and in a checkout of this project how the package survives `uv sync`.

    Args:
        requirement: As of `install_command`.
    """
    command = install_command(requirement)
    if not command.startswith("uv ") or not _is_checkout():
        return command
    return f"{command} (this is a checkout: uv sync removes it again, uv sync --inexact does not)"


def _is_checkout() -> bool:
    """Return whether this package is installed from the folder of a uv workspace, which `uv sync` keeps as locked."""
    try:
        url = json.loads(importlib.metadata.distribution("rl-core").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    if not url.get("dir_info", {}).get("editable"):
        return False
    return any((folder / "uv.lock").is_file() for folder in Path(unquote(urlparse(url["url"]).path)).parents)
