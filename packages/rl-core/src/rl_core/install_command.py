"""The command that installs a package into the environment of this process."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def install_command(requirement: str) -> str:
    """A command for a shell that installs a requirement here: by pip, or by uv in an environment that has no pip.

    Args:
        requirement: as pip takes it, such as `rl-envs[reasoning-gym]`.
    """
    quoted = f"'{requirement}'" if "[" in requirement else requirement
    if find_spec("pip") is not None:
        return f"pip install {quoted}"
    active = os.environ.get("VIRTUAL_ENV")
    is_active = active is not None and Path(active).resolve() == Path(sys.prefix).resolve()
    return f"uv pip install {quoted}{'' if is_active else f' --python {sys.executable}'}"
