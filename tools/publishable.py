"""Build the distributions of a tag, or check that a Python can install them; `.github/workflows/release.yml` does both.

    python tools/publishable.py build rl-core-v0.2.1 dist
    python tools/publishable.py check dist --python 3.13

`build` refuses a tag that is not the version in the tree. `check` installs the wheel in a new environment, with the
siblings of the same tree because they may not be published yet, and imports the package.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import distributions
from packaging.utils import parse_wheel_filename
from workspace import ROOT, packages, run, tag_of


def build(tag: str, output: Path) -> list[str]:
    """Build the source distribution of a tag and the wheel from it, and return what is wrong with them.

    Args:
        tag: Tag of a package's version, `rl-core-v0.2.1`; the tree has to be at it.
        output: Folder for both files, which is replaced.
    """
    name = tag.rpartition("-v")[0]
    package = packages(ROOT).get(name)
    if package is None or tag_of(name, package.version) != tag:
        tree = ", ".join(tag_of(each.name, each.version) for each in packages(ROOT).values())
        return [f"{tag} is not a version of the tree, which has {tree}"]
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as from_tree:
        run(["uv", "build", "--quiet", "--package", name, "--out-dir", str(output.absolute())], cwd=ROOT)
        run(["uv", "build", "--quiet", "--wheel", "--package", name, "--out-dir", from_tree], cwd=ROOT)
        (output / ".gitignore").unlink(missing_ok=True)
        return distributions.problems(output, Path(from_tree))


def check(built: Path, python: str) -> None:
    """Install a wheel with the siblings of the tree in a new environment, and import it.

    Args:
        built: Folder with one wheel.
        python: Version of the Python, such as `3.13`, or its path.

    Raises:
        RuntimeError: If a step fails, with its output.
    """
    (wheel,) = built.absolute().glob("*.whl")
    module = str(parse_wheel_filename(wheel.name)[0]).replace("-", "_")
    with tempfile.TemporaryDirectory() as scratch:
        siblings, interpreter = f"{scratch}/siblings", f"{scratch}/env/bin/python"
        run(["uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", siblings], cwd=ROOT)
        run(["uv", "venv", "--quiet", "--no-project", "--python", python, f"{scratch}/env"], cwd=ROOT)
        install = ["uv", "pip", "install", "--quiet", "--no-config", "--python", interpreter]
        run([*install, "--find-links", siblings, str(wheel)], cwd=ROOT)
        run(["uv", "pip", "check", "--python", interpreter], cwd=ROOT)
        run([interpreter, "-c", f"import {module}; print({module}.__all__)"], cwd=Path(scratch))
    sys.stdout.write(f"{wheel.name} installs and imports with Python {python}\n")


def main(arguments: list[str] | None = None) -> int:
    """Build or check; return 1 and print what is wrong if distributions are not fit to be published."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("tag", metavar="TAG")
    building.add_argument("output", type=Path, metavar="FOLDER")
    checking = commands.add_parser("check")
    checking.add_argument("built", type=Path, metavar="FOLDER")
    checking.add_argument("--python", required=True)
    options = parser.parse_args(arguments)
    if options.command == "check":
        check(options.built, options.python)
        return 0
    found = build(options.tag, options.output)
    sys.stderr.write("".join(f"{problem}\n" for problem in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
