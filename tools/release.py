"""Release a package: version, ranges, changelog, locks, distributions, commit and tag. Nothing is pushed.

    python tools/release.py rl-core 0.2.1 --needs-new rl-vllm
    python tools/release.py all 0.3.0 --dry-run

The siblings' ranges follow. A breaking version (0.x: another x; from 1.0 on: another major number) raises both bounds
of every sibling that needs the package. A compatible one raises the lower bound of the siblings in `--needs-new`: those
that use something that this version adds. `all` releases every package under one version and raises every range. A
sibling whose range is raised gets an entry in its changelog and is released next, by the same command.

All work is done in a temporary git worktree. The current branch and its tree change at the end, in one fast-forward, or
not at all. With `--dry-run` everything is done but the fast-forward and the tags, and the distributions are discarded.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import distributions
from changelog import released, sections, with_entry, with_release
from check_changes import tree_problems
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from workspace import ROOT, Package, folder, git, last_release, packages, run, tag_of

LOCKS = "tools/export_worker_locks.py"


@dataclass(frozen=True)
class Release:
    """What is released, and what follows for the siblings.

    Args:
        names: Packages that are released.
        version: Their version.
        raised: Packages whose ranges of the released ones get new bounds.
    """

    names: tuple[str, ...]
    version: Version
    raised: tuple[str, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the release."""
        return tuple(tag_of(name, self.version) for name in self.names)

    @property
    def message(self) -> str:
        """Message of the commit."""
        what = self.names[0] if len(self.names) == 1 else "every package"
        return f"Release {self.version} of {what}"


def plan(root: Path, name: str, version: str, needs_new: list[str]) -> Release:
    """Return the release of a package, or of all.

    Args:
        root: Folder of the workspace, a clean working tree.
        name: Package, or `all`.
        version: Version to release.
        needs_new: Siblings that work with this version only.

    Raises:
        ValueError: if the release is not possible; the message says what to do.
    """
    if changed := git(root, "status", "--porcelain").stdout.splitlines():
        raise ValueError(f"{len(changed)} uncommitted changes ({changed[0].strip()}, ...); commit or stash them first")
    found = packages(root)
    if name != "all" and name not in found:
        raise ValueError(f"{name!r} is not a package; choose all, {', '.join(found)}")
    if problems := tree_problems(root):
        raise ValueError("the tree is not consistent: " + "\n".join(problems))
    number = _final(version)
    names = tuple(found) if name == "all" else (name,)
    for each in names:
        _check(root, found[each], number)
    _check_bounds(names, found)
    return Release(names, number, _raised(names, number, found, needs_new))


def _final(version: str) -> Version:
    try:
        number = Version(version)
    except InvalidVersion as error:
        raise ValueError(f"{version!r} is not a version; write X.Y.Z") from error
    if str(number) != number.base_version or len(number.release) != 3:
        raise ValueError(f"{version!r} is not a final version; write X.Y.Z")
    return number


def _check(root: Path, package: Package, version: Version) -> None:
    last = last_release(root, package)
    if version <= last or version < package.version:
        raise ValueError(
            f"{package.name}: {version} is not higher than the last release, {last}"
            if version <= last
            else f"{package.name}: {version} is lower than {package.version} in its pyproject.toml"
        )
    if not sections(package.changelog)[0].entries:
        raise ValueError(
            f"{package.name}: nothing is under `## Unreleased` in {folder(package.name)}/CHANGELOG.md; write what "
            "changed, or release the packages that have changes one by one"
        )


def _check_bounds(names: tuple[str, ...], found: dict[str, Package]) -> None:
    """Refuse a release that needs a version of a sibling which is not released."""
    for name, sibling in ((name, sibling) for name in names for sibling in found if sibling not in names):
        for requirement in found[name].needs(sibling):
            lowest = next(Version(each.version) for each in requirement.specifier if each.operator == ">=")
            if lowest not in released(found[sibling].changelog):
                raise ValueError(
                    f"{name} needs `{requirement}`, which is not released; release {sibling} {lowest} first"
                )


def _raised(
    names: tuple[str, ...], version: Version, found: dict[str, Package], needs_new: list[str]
) -> tuple[str, ...]:
    """Return the packages whose ranges of the released ones are raised."""
    users = [package.name for package in found.values() if any(package.needs(name) for name in names)]
    if len(names) > 1:
        if needs_new:
            raise ValueError("--needs-new is for the release of one package: `all` raises every range")
        return tuple(users)
    if strangers := sorted(set(needs_new) - set(users)):
        raise ValueError(
            f"--needs-new {strangers[0]}: not a package that needs {names[0]}; choose from {', '.join(users) or 'none'}"
        )

    def admits(user: str) -> bool:
        return all(each.specifier.contains(version) for each in found[user].needs(names[0]))

    return tuple(user for user in users if user in needs_new or not admits(user))


def next_breaking(version: Version) -> str:
    """Return the first version that may break users of a version, as a range's upper bound."""
    return f"0.{version.minor + 1}" if version.major == 0 else str(version.major + 1)


def raised(requirement: str, version: Version) -> str:
    """Return a requirement on a package with the bounds of a new version.

    Args:
        requirement: Requirement as written, with extras and a marker.
        version: Lowest version that is allowed from now on.
    """
    parsed = Requirement(requirement)
    extras = f"[{','.join(sorted(parsed.extras))}]" if parsed.extras else ""
    marker = f" ; {parsed.marker}" if parsed.marker else ""
    return f"{parsed.name}{extras}>={version},<{next_breaking(version)}{marker}"


def write(root: Path, release: Release, date: str) -> None:
    """Write a release into a working tree: versions, ranges, changelogs and locks.

    Args:
        root: Folder of the workspace.
        release: Release to write.
        date: Day of the release, `YYYY-MM-DD`.
    """
    for name, package in packages(root).items():
        pyproject, changelog = package.pyproject, package.changelog
        if name in release.raised:
            pyproject, changelog = _with_ranges(package, release)
        if name in release.names:
            pyproject = pyproject.replace(f'\nversion = "{package.version}"\n', f'\nversion = "{release.version}"\n', 1)
            changelog = with_release(changelog, release.version, date)
        (root / folder(name) / "pyproject.toml").write_text(pyproject)
        (root / folder(name) / "CHANGELOG.md").write_text(changelog)
    if problems := tree_problems(root):
        raise RuntimeError("the release would leave the tree inconsistent: " + "\n".join(problems))
    # `uv run` names itself in UV: the uv in the environment is another version, which writes markers differently
    run([os.environ.get("UV", "uv"), "lock"], cwd=root)
    run([sys.executable, LOCKS], cwd=root)


def _with_ranges(package: Package, release: Release) -> tuple[str, str]:
    pyproject, changelog = package.pyproject, package.changelog
    for name in reversed(release.names):
        for requirement in {each for each in package.requirements if Requirement(each).name == name}:
            pyproject = pyproject.replace(f'"{requirement}"', f'"{raised(requirement, release.version)}"')
        if package.needs(name):
            changelog = with_entry(changelog, f"Needs {raised(name, release.version)}.")
    return pyproject, changelog


def build(root: Path, release: Release, out: Path) -> list[Path]:
    """Build the source distribution and the wheel of each released package, and check them.

    Raises:
        RuntimeError: if a build fails or a distribution is not what the tree holds.
    """
    with tempfile.TemporaryDirectory() as from_tree:
        for name in release.names:
            command = ["uv", "build", "--package", name, "--no-create-gitignore", "--out-dir"]
            run([*command, str(out)], cwd=root)
            run([*command, from_tree, "--wheel"], cwd=root)
        if problems := distributions.problems(out, Path(from_tree), root):
            raise RuntimeError("the distributions are wrong: " + "\n".join(problems))
    return sorted(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))


@contextmanager
def worktree(root: Path) -> Iterator[Path]:
    """Make a temporary worktree of HEAD; it is removed at the end."""
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "tree"
        git(root, "worktree", "add", "--quiet", "--detach", str(path), "HEAD")
        try:
            yield path
        finally:
            git(root, "worktree", "remove", "--force", str(path))


def make(root: Path, release: Release, out: Path, *, dry_run: bool) -> None:
    """Make a release: see the module's docstring.

    Args:
        root: Folder of the workspace.
        release: Release that `plan` returned.
        out: Folder that gets the distributions.
        dry_run: Leave the branch, the tags and `out` as they are.
    """
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    with worktree(root) as tree, tempfile.TemporaryDirectory() as built:
        write(tree, release, date)
        git(tree, "add", "--all")
        _say(git(tree, "diff", "--cached", "--stat").stdout.rstrip())
        files = build(tree, release, Path(built))
        _say(f"built and checked: {', '.join(file.name for file in files)}")
        for user in (each for each in release.raised if each not in release.names):
            _say(f"{user} needs {release.names[0]} {release.version}: release {user} next")
        if dry_run:
            _say(f"dry run: no commit, no tag {', '.join(release.tags)}, nothing in {out}")
            return
        git(tree, "commit", "--quiet", "--message", release.message)
        commit = git(tree, "rev-parse", "HEAD").stdout.strip()
        git(root, "merge", "--quiet", "--ff-only", commit)
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy2(file, out)
    for name, tag in zip(release.names, release.tags, strict=True):
        git(root, "tag", "--annotate", tag, "--message", f"{name} {release.version}", commit)
    _say(f"distributions in {out}; nothing was pushed. To publish: git push origin HEAD {' '.join(release.tags)}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main(arguments: list[str] | None = None) -> int:
    """Make a release, or print why it is not possible and return 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="name of a package, or all")
    parser.add_argument("version", help="version to release, X.Y.Z")
    parser.add_argument("--needs-new", metavar="SIBLING", nargs="+", default=[], help="siblings that need this version")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "dist", help="folder of the distributions (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    try:
        release = plan(ROOT, options.package, options.version, options.needs_new)
        make(ROOT, release, options.out_dir.resolve(), dry_run=options.dry_run)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"no release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
