"""Names, versions and entry points of packages that are imported from a checkout without having been installed."""

from __future__ import annotations

import atexit
import importlib.metadata
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path


def offer(packages: Iterable[Path]) -> None:
    """Make the sources of these package folders importable, and their metadata known to `importlib.metadata`.

    Processes that this one spawns inherit both through `sys.path`.
    """
    missing = []
    for package in packages:
        source = str(package / "src")
        if source not in sys.path:
            sys.path.insert(0, source)
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        try:
            importlib.metadata.version(project["name"])
        except importlib.metadata.PackageNotFoundError:
            missing.append(project)
    if missing:
        folder = Path(tempfile.mkdtemp(prefix="rl-metadata-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for project in missing:
            _describe(project, folder)
        sys.path.append(str(folder))


def _describe(project: dict, folder: Path) -> None:
    """Write the metadata that an installation would."""
    name = project["name"].replace("-", "_")
    info = folder / f"{name}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
