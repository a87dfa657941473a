"""The checkout that the driver's packages are installed from, if there is one."""

from __future__ import annotations

import importlib.metadata
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rl_launch.worker_envs.spec import Wanted
from rl_launch.worker_envs.wheel import source_folder


@dataclass(frozen=True)
class Checkout:
    """A uv workspace with its lock.

    Args:
        root: Root of the workspace.
    """

    root: Path

    @cached_property
    def members(self) -> dict[str, Path]:
        """Folders of the workspace's packages by distribution name."""
        patterns = tomllib.loads((self.root / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
        folders = sorted(folder for pattern in patterns for folder in self.root.glob(pattern))
        files = [folder / "pyproject.toml" for folder in folders if (folder / "pyproject.toml").is_file()]
        return {tomllib.loads(file.read_text())["project"]["name"]: file.parent for file in files}

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.root / "uv.lock"

    def has(self, wanted: tuple[Wanted, ...]) -> bool:
        """Return whether all of these are members."""
        return all(each.distribution in self.members for each in wanted)


def find_checkout() -> Checkout | None:
    """The workspace that rl-launch is installed from in editable mode; None if it is not."""
    folder = source_folder(importlib.metadata.distribution("rl-launch"))
    if folder is None:
        return None
    for candidate in (folder, *folder.parents):
        project = candidate / "pyproject.toml"
        if (candidate / "uv.lock").is_file() and project.is_file():
            uv = tomllib.loads(project.read_text()).get("tool", {}).get("uv", {})
            if "workspace" in uv:
                return Checkout(candidate)
    return None
