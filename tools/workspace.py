"""Packages of the workspace: their versions, changelogs and the ranges between them."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from changelog import released
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Package:
    """A package as its files describe it.

    Args:
        pyproject: Content of its pyproject.toml.
        changelog: Content of its CHANGELOG.md.
    """

    pyproject: str
    changelog: str

    @cached_property
    def project(self) -> dict[str, Any]:
        """Table `project` of its pyproject.toml."""
        return dict(tomllib.loads(self.pyproject)["project"])

    @property
    def name(self) -> str:
        """Name of its distribution."""
        return str(self.project["name"])

    @property
    def version(self) -> Version:
        """Version in its pyproject.toml."""
        return Version(self.project["version"])

    @cached_property
    def requirements(self) -> list[str]:
        """Requirements of the package and its extras, as written."""
        extras = self.project.get("optional-dependencies", {}).values()
        return [*self.project.get("dependencies", ()), *(each for extra in extras for each in extra)]

    def needs(self, name: str) -> list[Requirement]:
        """Return the requirements on one sibling, of the package and of its extras."""
        return [each for each in map(Requirement, self.requirements) if each.name == name]


def folder(name: str) -> str:
    """Return the folder of a package, relative to the root."""
    return f"packages/{name}"


def packages(root: Path) -> dict[str, Package]:
    """Return the packages in a working tree by name."""
    found = sorted(root.glob("packages/*/pyproject.toml"))
    read = [Package(file.read_text(), (file.parent / "CHANGELOG.md").read_text()) for file in found]
    return {package.name: package for package in read}


def package_at(root: Path, ref: str, name: str) -> Package | None:
    """Return a package as it is at a commit or tag; None if the package does not exist there."""
    files = [f"{ref}:{folder(name)}/{file}" for file in ("pyproject.toml", "CHANGELOG.md")]
    if any(git(root, "cat-file", "-e", file, check=False).returncode for file in files):
        return None
    return Package(*(git(root, "show", file).stdout for file in files))


def tag_of(name: str, version: Version) -> str:
    """Return the name of the tag of a released version."""
    return f"{name}-v{version}"


def tagged(root: Path, name: str) -> list[Version]:
    """Return the versions of a package that have a tag in this clone, newest first."""
    prefix = f"{name}-v"
    tags = git(root, "tag", "--list", f"{prefix}*").stdout.split()
    return sorted((Version(tag.removeprefix(prefix)) for tag in tags), reverse=True)


def last_release(root: Path, package: Package) -> Version:
    """Return the highest version that has a section in the changelog or a tag."""
    return max([*released(package.changelog), *tagged(root, package.name)], default=Version("0"))


def git(root: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git in a repository; see `run`."""
    return run(["git", "-C", str(root), *arguments], check=check)


def run(command: list[str], *, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output.

    Raises:
        RuntimeError: if it fails and `check` is set, with the command and its error output.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{(done.stderr or done.stdout).strip()}")
    return done
