"""Check built distributions: `python tools/distributions.py FOLDER TREE_FOLDER`.

FOLDER holds source distributions and the wheels that were built from them, TREE_FOLDER wheels of the same packages that
were built from the tree. Both wheels of a package have to hold the same files, with every file of `src` among them.
"""

from __future__ import annotations

import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from workspace import ROOT, folder


def problems(built: Path, from_tree: Path, root: Path = ROOT) -> list[str]:
    """Return what is wrong with built distributions.

    Args:
        built: Folder of source distributions and of the wheels that were built from them.
        from_tree: Folder of wheels that were built from the tree.
        root: Folder of the workspace that they were built from.
    """
    wheels = {_identity(wheel): wheel for wheel in sorted(built.glob("*.whl"))}
    expected = {_identity(wheel): wheel for wheel in sorted(from_tree.glob("*.whl"))}
    sources = {parse_sdist_filename(path.name) for path in built.glob("*.tar.gz")}
    if not expected:
        return [f"{from_tree} holds no wheel"]
    found = [f"{name} {version}: no source distribution" for name, version in sorted(expected.keys() - sources)]
    for (name, version), wheel in expected.items():
        if (name, version) not in wheels:
            found.append(f"{name} {version}: no wheel was built from its source distribution")
            continue
        found += [f"{name} {version}: {each}" for each in _differences(wheels[name, version], wheel)]
        found += [f"{name} {version}: {each}" for each in _lacking(wheel, root / folder(name) / "src")]
        found += [f"{name} {version}: {each}" for each in _metadata_problems(wheel, name, version)]
    return found


def _identity(wheel: Path) -> tuple[str, Version]:
    name, version, _, _ = parse_wheel_filename(wheel.name)
    return name, version


def _files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _differences(from_source: Path, from_tree: Path) -> list[str]:
    left, right = _files(from_source), _files(from_tree)
    names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"the wheel built from the source distribution differs from that built from the tree in {shown}"]


def _lacking(wheel: Path, source: Path) -> list[str]:
    held = set(_files(wheel))
    files = (path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    names = {path.relative_to(source).as_posix() for path in files}
    return [f"{name} is not in the wheel" for name in sorted(names - held)]


def _metadata_problems(wheel: Path, name: str, version: Version) -> list[str]:
    (content,) = (content for path, content in _files(wheel).items() if path.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(content.decode())
    got = canonicalize_name(metadata["Name"]), Version(metadata["Version"])
    stated = [] if got == (name, version) else [f"its metadata state {got[0]} {got[1]}"]
    missing = [key for key in ("Summary", "Requires-Python", "License-Expression", "License-File") if not metadata[key]]
    return [*stated, *(f"its metadata lack {key}" for key in missing)]


def main(arguments: list[str] | None = None) -> int:
    """Print problems, one a line, and return 1 if there are any."""
    built, from_tree = map(Path, sys.argv[1:] if arguments is None else arguments)
    found = problems(built, from_tree)
    sys.stderr.write("".join(f"{problem}\n" for problem in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
