"""Settings and declarations of the environment `repository` and of the dataset `repository_tasks`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import Config, PathText, Problem, ProblemError, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.sandbox.config import SandboxConfig

_SOURCES = """
bash c cc cjs clj cljs cpp cs css cts cu cuh cxx d dart el elm erl ex f90 fish fs fsx gleam go graphql h hh hpp
hrl hs htm html hxx j2 java jinja jl js jsx kt less lisp lua m mjs ml mli mm mts nim pas php pl pm proto pxd py pyi
pyx r rb rkt rs sass scala scm scss sh sql svelte swift tcl ts tsx v vb vhd vhdl vue zig zsh
"""
SOURCE_FILES = tuple(f"*.{suffix}" for suffix in _SOURCES.split())
"""Patterns of program sources: suffixes that settings of test commands do not have."""
TEST_FILES = (
    *("test[!a-z]*", "tests[!a-z]*", "Test[!a-z]*", "Tests[!a-z]*", "Test*.java", "*IT.java", "*.cy.*", "*Specs.*"),
    *("*_test.*", "*_tests.*", "*[.-]test.*", "*Test.*", "*Tests.*", "*TestCase.*", "*_tests/*", "*Test/*", "*Tests/*"),
    *("__tests__/*", "*[._-]spec.*", "*Spec.*", "spec/*", "e2e/*", "t/*"),
    *("features/steps/*", "features/environment.py"),
)
"""Patterns of tests."""
RUN_FILES = (
    # Sources that Python, build tools and test commands run by themselves.
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "noxfile.py", "toxfile.py", "fabfile.py"),
    *("dodo.py", "hatch_build.py", "*.config.*", "*.conf.*", "*.setup.*", "*.workspace.*", "gulpfile.*", "Gruntfile.*"),
    *("Jakefile.*", "build.rs", "build.zig", "build.clj", "user.clj", "project.clj", "Package.swift", "Setup.hs"),
    *("setup_suite.*", "project/*.scala", "minitest/*", "rubygems_plugin.rb", "__mocks__/*", "buildSrc/*"),
    *("node_modules/*", "vendor/*", ".*"),
    # Settings, for those who add patterns to `solution`.
    *("pytest.*", "pyproject.toml", "tox.ini", "setup.cfg", "package.json", "*.dist-info/*", "*.egg-info/*"),
    *("*.pth", "*.pyc"),
)
"""Patterns of files that are read or run before a solution is, and of hidden files."""


class RepositorySandboxConfig(SandboxConfig):
    """Sandbox of an agent and of the tests, with room for a working copy."""

    cpu_s: float = Field(default=300.0, gt=0)
    """CPU time limit in seconds of each process of an agent or of a test command, rounded up to whole seconds."""
    wall_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of an agent, and of each test command. The working copy that an agent has at its limit is
    scored."""
    memory_mib: int = Field(default=2048, ge=64)
    """Memory limit in MiB of an agent, or of a test command, with all processes."""
    scratch_mib: int = Field(default=64, ge=1)
    """Size in MiB of the folder that has the working copy, the only files that an agent can write."""
    processes: int = Field(default=64, ge=1, le=4096)
    """Maximum number of processes and threads of an agent, or of a test command."""


class RepositoryConfig(EnvironmentConfig):
    """Run an agent on a working copy of the row's repository in a sandbox, and score what it leaves by the row's
    tests. Needs an agent with `place: environment`."""

    sandbox: RepositorySandboxConfig = RepositorySandboxConfig()
    """Sandbox of agents and of tests, and its limits."""
    folder: PathText = "."
    """Base folder of relative paths in rows. The dataset `repository_tasks` makes them absolute itself."""
    reward: Literal["all", "share"] = "all"
    """Reward of a working copy: `all` is 1 if every test command succeeds, and the commands end at the first that
    fails; `share` is the fraction that succeed."""
    solution: list[str] = [*SOURCE_FILES]
    """Patterns of files whose changes by an agent count: program sources. Other files configure tools, and stay as the
    repository has them. A pattern matches a path in the repository, the end of a path after a slash, or all files of a
    folder (`data/*`). Add patterns of other files that belong to solutions, such as `CMakeLists.txt`."""
    protected: list[str] = [*TEST_FILES, *RUN_FILES]
    """Patterns of files that do not count although they match `solution`: tests, and sources that tools run by
    themselves. An agent that may change the tests can pass them."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=64, ge=1)
    """Maximum number of agents that one call asks for their end; a call does not wait for any of them."""
    max_concurrent: Annotated[int | None, WhenChanged.RESUME] = Field(default=32, ge=1)
    """Maximum number of agents at a time on each node. null sets no limit."""
    num_workers: Annotated[int | None, WhenChanged.RESUME] = Field(default=1, ge=1)
    """Number of processes that start agents, each with threads for its agents. One is enough for most runs."""

    @model_validator(mode="after")
    def _contains_agents(self) -> Self:
        if self.sandbox.isolation != "namespaces":
            reason = "cannot limit the network of an agent to the policy"
            remedy = "Set namespaces, or sandbox.url to a server of sandboxes"
            raise ProblemError(Problem("sandbox.isolation", reason, got=self.sandbox.isolation, remedy=remedy))
        return self


class RepositoryTasksSettings(Config):
    """Tasks from a JSON Lines file, one per line, with the fields that the environment `repository` reads and the task
    in words as `issue`."""

    path: PathText
    """A `.jsonl` file. Paths of repositories in it are relative to its folder."""
    max_rows: int | None = Field(default=None, gt=0)
    """Maximum number of rows to read from the file; all if unset."""


PLUGIN = EnvironmentPlugin(
    "repository",
    RepositoryConfig,
    "rl_envs.repository.environment:RepositoryEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.repository.environment:check_row",
    machine_check="rl_envs.repository.environment:check_machine",
    runs_agents=True,
)

DATASET = DatasetPlugin(
    "repository_tasks", "rl_envs.repository.task:load", Requirement("rl-envs"), settings=RepositoryTasksSettings
)
