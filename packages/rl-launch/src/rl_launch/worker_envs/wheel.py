"""Wheels of the packages in the driver's environment, so that a worker runs exactly the driver's code."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs.node_build import clean_environment, find_uv

# The installer writes these files; they are not part of the wheel.
_INSTALLERS = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json")
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Wheel(NamedTuple):
    """A wheel in memory.

    Args:
        file_name: As an installer expects it.
        content: Contents of the file; equal for equal code.
    """

    file_name: str
    content: bytes


def installed_wheel(distribution: str) -> Wheel:
    """Return the wheel of an installed pure-Python distribution.

    Built from its source folder if it is editable, else assembled from its files.

    Raises:
        WorkerEnvironmentError: If its files are not recorded, or it is built for one platform.
    """
    found = importlib.metadata.distribution(distribution)
    folder = source_folder(found)
    if folder is None:
        return _repacked(found)
    with tempfile.TemporaryDirectory() as out:
        command = [find_uv(), "build", "--quiet", "--wheel", "--no-create-gitignore", "--out-dir", out, str(folder)]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise WorkerEnvironmentError(f"no wheel could be built from {folder}:\n{done.stderr.strip()}")
        (path,) = Path(out).glob("*.whl")
        return Wheel(path.name, path.read_bytes())


def source_folder(distribution: importlib.metadata.Distribution) -> Path | None:
    """Return the source folder of an editable distribution; None if it is not editable."""
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not url.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(url["url"]).path))


def _repacked(distribution: importlib.metadata.Distribution) -> Wheel:
    name, version = distribution.metadata["Name"], distribution.version
    tags = [line[5:] for line in (distribution.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    pythons = [tag.removesuffix("-none-any") for tag in tags]
    if not distribution.files or "py3" not in pythons:
        raise WorkerEnvironmentError(
            f"{name} {version} cannot be copied to workers: it is not a pure-Python wheel with a list of its files; "
            "install it with pip or uv, or use cluster.worker_envs=shared"
        )
    contents: dict[str, bytes] = {}
    for file in distribution.files:
        in_metadata = file.parts[0].endswith(".dist-info") and len(file.parts) == 2
        is_installers = in_metadata and file.name in _INSTALLERS
        if file.parts[0] != ".." and "__pycache__" not in file.parts and not is_installers:
            contents[file.as_posix()] = Path(str(file.locate())).read_bytes()
    metadata = next(file.parts[0] for file in distribution.files if file.name == "METADATA")
    lines, archive, record = io.StringIO(), io.BytesIO(), f"{metadata}/RECORD"
    writer = csv.writer(lines, lineterminator="\n")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        for path in sorted(contents):
            digest = base64.urlsafe_b64encode(hashlib.sha256(contents[path]).digest()).rstrip(b"=").decode()
            writer.writerow((path, f"sha256={digest}", len(contents[path])))
            target.writestr(zipfile.ZipInfo(path, _EPOCH), contents[path])
        writer.writerow((record, "", ""))
        target.writestr(zipfile.ZipInfo(record, _EPOCH), lines.getvalue())
    return Wheel(f"{name.replace('-', '_')}-{version}-{'.'.join(pythons)}-none-any.whl", archive.getvalue())
