"""A small workspace in git for the tests of the tools; being here, it also puts the tools on the path."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

TOOLS = Path(__file__).parent
WORKSPACE = """
[project]
name = "rl-workspace"
version = "0"
requires-python = ">=3.11"
dependencies = ["rl-launch", "rl-vllm"]

[tool.uv]
package = false

[tool.uv.workspace]
members = ["packages/*"]

[tool.uv.sources]
rl-core = { workspace = true }
rl-launch = { workspace = true }
rl-vllm = { workspace = true }
"""
PACKAGE = """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "NAME"
version = "0.2.0"
description = "A package of a test"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = [DEPENDENCIES]

[tool.hatch.build.targets.wheel]
packages = ["src/MODULE"]
"""
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- Something new.\n\n## 0.2.0 - 2026-01-01\n\n- Everything.\n"
NEEDS = {"rl-core": "", "rl-launch": '"rl-core>=0.2.0,<0.3"', "rl-vllm": '"rl-core>=0.2.0,<0.3"'}


class Repository:
    """A workspace of three packages in git: rl-core, and rl-launch and rl-vllm that need it.

    Args:
        root: Its folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __truediv__(self, path: str) -> Path:
        return self.root / path

    def git(self, *arguments: str) -> str:
        """Run git and return its output."""
        return subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=True).stdout

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text that a file holds once."""
        text = (self.root / path).read_text()
        assert text.count(old) == 1
        (self.root / path).write_text(text.replace(old, new))

    def append(self, path: str, text: str) -> None:
        """Add text at the end of a file."""
        (self.root / path).write_text((self.root / path).read_text() + text)

    def commit(self) -> str:
        """Commit everything; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "A change")
        return self.git("rev-parse", "HEAD").strip()


def _write(root: Path) -> None:
    (root / "tools").mkdir(parents=True)
    for file in TOOLS.glob("*.py"):
        shutil.copy2(file, root / "tools")
    (root / "pyproject.toml").write_text(WORKSPACE)
    (root / ".gitignore").write_text("/dist/\n__pycache__/\n")
    for name, needs in NEEDS.items():
        module = name.replace("-", "_")
        source = root / "packages" / name / "src" / module
        source.mkdir(parents=True)
        (source / "__init__.py").write_text('"""A module."""\n')
        (source.parents[1] / "README.md").write_text(f"# {name}\n")
        (source.parents[1] / "LICENSE").write_text("A licence\n")
        (source.parents[1] / "CHANGELOG.md").write_text(CHANGELOG)
        text = PACKAGE.replace("NAME", name).replace("MODULE", module).replace("DEPENDENCIES", needs)
        (source.parents[1] / "pyproject.toml").write_text(text)
    worker_envs = root / "packages/rl-launch/src/rl_launch/worker_envs"
    worker_envs.mkdir()
    (worker_envs / "__init__.py").touch()
    subprocess.run(["uv", "lock", "--quiet"], cwd=root, check=True)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed repository to copy."""
    root = tmp_path_factory.mktemp("template") / "repository"
    _write(root)
    repository = Repository(root)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.git("config", "user.name", "Tests")
    repository.git("config", "user.email", "tests@localhost")
    repository.git("config", "commit.gpgsign", "false")
    repository.git("config", "tag.gpgsign", "false")
    repository.commit()
    return root


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Repository:
    """A clean repository whose three packages are at version 0.2.0 with an unreleased entry each."""
    return Repository(Path(shutil.copytree(template, tmp_path / "repository")))


@pytest.fixture
def released(repository: Repository) -> Repository:
    """The same with tags for version 0.2.0."""
    for name in NEEDS:
        repository.git("tag", "--annotate", f"{name}-v0.2.0", "--message", f"{name} 0.2.0")
    return repository
