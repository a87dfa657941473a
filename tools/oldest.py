"""Import every package with the oldest siblings that its ranges allow: `python tools/oldest.py [PACKAGE ...]`.

Each package is built from the tree. Its siblings are the oldest released versions that its ranges, and theirs, allow
together. A released version is built from its tag (`rl-core-v0.2.1`); the version in the tree stands for itself if it
has no tag. Every version is installed in a folder without its other dependencies, which are those of the environment
that runs this, and `tools/importable.py` imports the package with the folders of its siblings on the path.

A package that uses a name which its oldest sibling does not have fails here. Raise the version of the sibling in its
pyproject.toml and the lower bound in the package's, or release the sibling with `--needs-new`.
"""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from workspace import ROOT, Package, folder, git, package_at, packages, run, tag_of, tagged

IMPORTABLE = Path(__file__).with_name("importable.py")


@dataclass(frozen=True)
class Source:
    """A version of a package and its origin.

    Args:
        package: The package as it is in that version.
        tag: Tag that it is built from; None for the tree.
    """

    package: Package
    tag: str | None

    def __str__(self) -> str:
        return f"{self.package.name} {self.package.version} ({self.tag or 'tree'})"


def versions(root: Path, package: Package) -> list[Source]:
    """Return the versions of a package that can be built, oldest first; the tree's if it has no tag."""
    tags = {version: tag_of(package.name, version) for version in tagged(root, package.name)}
    at_tags = [Source(found, tag) for tag in tags.values() if (found := package_at(root, tag, package.name))]
    tree = [] if package.version in tags else [Source(package, None)]
    return sorted([*at_tags, *tree], key=lambda source: source.package.version)


def oldest(package: Package, available: Mapping[str, list[Source]]) -> list[Source] | None:
    """Return the oldest siblings that fit a package and one another; None if none do.

    Args:
        package: Package whose ranges count.
        available: Versions of every package that can be built, oldest first.
    """
    allowed = [
        [source for source in available[name] if _fit([package, source.package])]
        for name in _siblings(package, available)
    ]
    for chosen in itertools.product(*allowed):
        if _fit([package, *(source.package for source in chosen)]):
            return list(chosen)
    return None


def _siblings(package: Package, available: Mapping[str, list[Source]]) -> list[str]:
    """Return the names of the packages that a package needs, in any of their versions, those that need others first."""
    names: list[str] = []
    waiting = [package]
    while waiting:
        user = waiting.pop(0)
        for name in (name for name in available if user.needs(name)):
            if name in names:
                names.remove(name)
            names.append(name)
            waiting += [source.package for source in available[name]]
    return names


def _fit(chosen: list[Package]) -> bool:
    return all(
        requirement.specifier.contains(sibling.version)
        for user in chosen
        for sibling in chosen
        for requirement in user.needs(sibling.name)
    )


def remarks(package: Package, siblings: list[Source], available: Mapping[str, list[Source]]) -> Iterator[str]:
    """Yield what a reader has to know about the choice: lower bounds that could not be built."""
    for source in siblings:
        for requirement in package.needs(source.package.name):
            bound = min(Version(each.version) for each in requirement.specifier if each.operator == ">=")
            known = [each.package.version for each in available[source.package.name]]
            if bound not in known:
                yield (
                    f"no tag {tag_of(source.package.name, bound)} in this clone: {source} stands in for the lower "
                    f"bound of `{requirement}`, which is not tested; fetch the tags with `git fetch --tags`"
                )


def install(root: Path, source: Source, work: Path) -> Path:
    """Build a version and install it in a folder by itself, once; returns the folder.

    Args:
        root: Folder of the workspace.
        source: Version to install.
        work: Folder of the installations.
    """
    target = work / (source.tag or "tree") / source.package.name
    if not target.exists():
        with tempfile.TemporaryDirectory() as parent:
            built = _extracted(root, source, Path(parent)) if source.tag else root / folder(source.package.name)
            run(["uv", "build", "--quiet", "--wheel", "--no-config", "--out-dir", parent, str(built)])
            (wheel,) = Path(parent).glob("*.whl")
            run(["uv", "pip", "install", "--quiet", "--no-deps", "--offline", "--target", str(target), str(wheel)])
    return target


def _extracted(root: Path, source: Source, target: Path) -> Path:
    name = folder(source.package.name)
    command = ["git", "-C", str(root), "archive", "--format=tar", str(source.tag), name]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        content.extraction_filter = getattr(tarfile, "data_filter", None)  # there is none before Python 3.11.4
        content.extractall(target)
    return target / name


def check(root: Path, package: Package, siblings: list[Source], work: Path) -> bool:
    """Install a package and versions of its siblings, import it and print the outcome.

    Args:
        root: Folder of the workspace.
        package: Package of the tree.
        siblings: Versions to install.
        work: Folder of the installations.

    Returns:
        True if everything could be imported.
    """
    folders = [install(root, source, work) for source in [Source(package, None), *siblings]]
    done = subprocess.run(
        [sys.executable, str(IMPORTABLE), package.name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    others = ", ".join(map(str, siblings)) or "no sibling"
    _say(f"{package.name} {package.version} with {others}: {done.stdout.strip() or 'failed'}")
    if done.returncode:
        _say("".join(f"    {line}\n" for line in done.stderr.splitlines()).rstrip())
    return not done.returncode


def main() -> int:
    """Check packages, all by default, and return 1 if one cannot be imported with its oldest siblings."""
    found = packages(ROOT)
    chosen = sys.argv[1:] or list(found)
    if unknown := [name for name in chosen if name not in found]:
        sys.stderr.write(f"{unknown[0]!r} is not a package; choose from {', '.join(found)}\n")
        return 1
    available = {name: versions(ROOT, package) for name, package in found.items()}
    if all(source.tag is None for sources in available.values() for source in sources):
        shallow = git(ROOT, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
        why = ", which is shallow" if shallow else ""
        _say(f"no release has a tag in this clone{why}: every sibling is the one in the tree")
    with tempfile.TemporaryDirectory() as work:
        good = [_checked(found[name], found, available, Path(work)) for name in chosen]
    return int(not all(good))


def _checked(package: Package, found: Mapping[str, Package], available: Mapping[str, list[Source]], work: Path) -> bool:
    siblings = oldest(package, available)
    if siblings is None:
        siblings = [Source(found[name], None) for name in _siblings(package, available)]
        _say(f"{package.name}: no released siblings fit one another: those in the tree are used; release them next")
    for remark in remarks(package, siblings, available):
        _say(f"{package.name}: {remark}")
    return check(ROOT, package, siblings, work)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
