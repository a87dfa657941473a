"""Check that versions, changelogs and the ranges between packages agree.

    python tools/check_changes.py
    python tools/check_changes.py --base origin/main [--internal PACKAGE ...]

Without `--base` it checks what holds for a tree by itself. With `--base` it also checks the changes since the merge
base with that commit, those that are not committed included: a package with a public change needs a new entry in its
changelog. `--internal` names packages whose changes are not visible to users, such as a refactoring.

A change is public if it is under `packages/NAME/src`, except suites for tests (`testing/`) and exports of the lock
(`worker_envs/locks/`). Recipes and other data that the package ships are public.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from changelog import released, sections
from packaging.requirements import Requirement
from packaging.version import Version
from workspace import ROOT, Package, folder, git, package_at, packages, tagged

PRIVATE = ("/testing/", "/worker_envs/locks/")


def tree_problems(root: Path) -> list[str]:
    """Return what is wrong in a working tree without comparing it to another one.

    Args:
        root: Folder of the workspace.
    """
    found = packages(root)
    malformed = [f"{name}: CHANGELOG.md: {problem}" for name, each in found.items() if (problem := _malformed(each))]
    return malformed or [problem for package in found.values() for problem in _problems(package, found)]


def change_problems(root: Path, base: str, internal: Collection[str] = ()) -> list[str]:
    """Return what is wrong with the changes of a working tree since a commit.

    Args:
        root: Folder of the workspace.
        base: Commit to compare with; changes since the merge base count.
        internal: Names of packages whose changes need no entry.

    Raises:
        ValueError: if `base` is not a commit of this clone, or a name in `internal` is not a package.
    """
    found = packages(root)
    if unknown := sorted(set(internal) - set(found)):
        raise ValueError(f"--internal {unknown[0]}: not a package; there are {', '.join(found)}")
    start = _merge_base(root, base)
    changed = set(_publicly_changed(root, start, found))
    problems = []
    for name, package in found.items():
        before = package_at(root, start, name)
        if name in changed - set(internal) and not _new_entries(package, before):
            problems.append(
                f"{name}: files under {folder(name)}/src changed since {base} and the changelog did not; add an entry "
                f"under `## Unreleased` in {folder(name)}/CHANGELOG.md, or pass --internal {name} if no user sees the "
                "change"
            )
        if before is not None:
            problems += _release_problems(package, before, tagged(root, name))
    return problems


def _malformed(package: Package) -> str | None:
    try:
        sections(package.changelog)
    except ValueError as error:
        return str(error)
    return None


def _problems(package: Package, found: dict[str, Package]) -> Iterator[str]:
    newest = max(released(package.changelog), default=Version("0"))
    if package.version < newest:
        yield (
            f"{package.name}: version {package.version} in pyproject.toml is lower than section {newest} of the "
            "changelog; set the version of the newest section or a higher one"
        )
    for sibling in found.values():
        for requirement in package.needs(sibling.name):
            yield from (f"{package.name}: `{requirement}`: {problem}" for problem in _range(requirement, sibling))


def _range(requirement: Requirement, sibling: Package) -> Iterator[str]:
    if not requirement.specifier.contains(sibling.version):
        yield f"does not admit version {sibling.version} of {sibling.name}, which is in this tree; widen the range"
    bounds = {each.operator: Version(each.version) for each in requirement.specifier}
    if set(bounds) != {">=", "<"}:
        yield "is not a range `>=X.Y.Z,<A.B`; write both bounds"
        return
    known = {*released(sibling.changelog), sibling.version}
    if bounds[">="] not in known:
        yield (
            f"{sibling.name} has no version {bounds['>=']}: it is neither a section of its changelog nor the version "
            "of this tree; choose the oldest released version that works"
        )


def _merge_base(root: Path, base: str) -> str:
    done = git(root, "merge-base", base, "HEAD", check=False)
    if done.returncode:
        raise ValueError(
            f"--base {base}: no common commit with HEAD in this clone; fetch it first, in a shallow clone with "
            f"`git fetch --unshallow`\n{done.stderr.strip()}".rstrip()
        )
    return done.stdout.strip()


def _publicly_changed(root: Path, start: str, names: Iterable[str]) -> Iterator[str]:
    tracked = git(root, "diff", "--name-only", start).stdout.splitlines()
    untracked = git(root, "ls-files", "--others", "--exclude-standard").stdout.splitlines()
    files = [file for file in [*tracked, *untracked] if not any(part in file for part in PRIVATE)]
    for name in names:
        if any(file.startswith(f"{folder(name)}/src/") for file in files):
            yield name


def _new_entries(package: Package, before: Package | None) -> set[str]:
    """Return the entries that are unreleased, or were released since, and were not there before."""
    now = sections(package.changelog)
    then = sections(before.changelog) if before else []
    old = {section.version for section in then if section.version is not None}
    present = {entry for section in now if section.version not in old for entry in section.entries}
    return present - {entry for section in then for entry in section.entries}


def _release_problems(package: Package, before: Package, tags: list[Version]) -> Iterator[str]:
    earlier = released(before.changelog)
    closed = [version for version in released(package.changelog) if version not in earlier]
    if not closed:
        return
    if package.version != max(closed):
        yield (
            f"{package.name}: section {max(closed)} of the changelog was closed and the version in pyproject.toml is "
            f"{package.version}; release with `python tools/release.py {package.name} VERSION`"
        )
    last = max([*earlier, *(tag for tag in tags if tag not in closed)], default=None)
    if last is not None and min(closed) <= last:
        yield (
            f"{package.name}: section {min(closed)} of the changelog was closed after {last} had been released; "
            "release a higher version"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print problems, one a line, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REF", help="commit to compare with")
    parser.add_argument("--internal", metavar="PACKAGE", nargs="+", default=[], help="packages without a public change")
    options = parser.parse_args(arguments)
    if options.internal and options.base is None:
        parser.error("--internal needs --base")
    try:
        problems = tree_problems(ROOT)
        if options.base is not None and not problems:
            problems = change_problems(ROOT, options.base, options.internal)
    except ValueError as error:
        problems = [str(error)]
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
