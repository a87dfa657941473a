"""The part of an agent's changes that counts: source files that no test command reads as its own."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise

from rl_envs.repository.task import RepositoryTask, is_python
from rl_envs.repository.working_copy import overlaid
from rl_envs.sandbox.tree import TreeEntry, parents

PYTEST_SETTINGS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
"""Files of a repository that set which files are tests."""
UNITTEST_FILES = "test*.py"
"""Pattern of the files that `unittest` and `manage.py test` search for tests."""
INTERPRETERS = ("bash", "bun", "dash", "deno", "node", "perl", "php", "ruby", "sh", "zsh")
"""Commands whose first argument is the program that they run."""
MISSED_MODULES = ("org",)
"""Modules that Python's library tries to import, and does not have."""
_PYTHON_FILES = re.compile(r"python_files\s*=\s*(\[[^]]*\]|.*(?:\n[ \t]+.*)*)")
_PATTERN = re.compile(r"[^\s,\[\]\"']+")


class SolutionFiles:
    """Decides which of the files that an agent leaves count. The others are as they are in the repository.

    Args:
        base: Files of the repository.
        task: The tests.
        solution: Patterns of files that may count.
        protected: Patterns of files that do not count.
        installed: Names of the modules that tests import from elsewhere, as `installed_modules` returns them.
    """

    def __init__(
        self,
        base: Sequence[TreeEntry],
        task: RepositoryTask,
        solution: Sequence[str],
        protected: Sequence[str],
        installed: frozenset[str],
    ) -> None:
        self._solution, self._installed = solution, installed
        self._protected = (*protected, *_test_patterns(base, task.commands))
        self._base = {entry.path: entry for entry in base}
        self._exam = self._base.keys() & set(_executed(task.commands)) | task.test_files.keys()
        self._known = {""}.union(self._base, *map(parents, self._base))

    def working_copy(self, left: Sequence[TreeEntry]) -> tuple[list[TreeEntry], list[str]]:
        """Return the files and links that tests see, and the paths of changes that do not count.

        Args:
            left: Files that the agent left.
        """
        files = {entry.path: entry for entry in left if entry.content is not None or entry.link}
        packages = set(self._packages(files))
        changed = [entry for path, entry in files.items() if entry != self._base.get(path)]
        counting = [entry for entry in changed if self._may_count(entry) and not self._takes_place(entry, packages)]
        replaced = {entry.path for entry in counting}
        own = [
            entry
            for path, entry in self._base.items()
            if path not in replaced and (path in files or not self._may_count(entry))
        ]
        # Python's caches are left by every agent that runs tests.
        ignored = [entry.path for entry in changed if entry.path not in replaced and "__pycache__" not in entry.path]
        return overlaid(counting, own), sorted(ignored)

    def _packages(self, paths: Iterable[str]) -> Iterator[str]:
        """Yield the folders that are packages. Python may import directly from a folder that was none before."""
        for folder, name in map(posixpath.split, paths):
            if name == "__init__.py" and (f"{folder}/{name}" in self._known or folder not in self._known):
                yield folder

    def _may_count(self, entry: TreeEntry) -> bool:
        """Return whether an entry is a file of a solution by its path. Links stay as in the repository."""
        known = self._base.get(entry.path, entry)
        is_file = entry.content is not None and not known.link
        return is_file and matches(entry.path, self._solution) and not self._is_exam(entry.path)

    def _is_exam(self, path: str) -> bool:
        """Return whether a file belongs to the tests. A package comes before a module with the same name."""
        modules = [path, *(f"{parent}.py" for parent in parents(path))]
        return any(each in self._exam or matches(each, self._protected) for each in modules)

    def _takes_place(self, entry: TreeEntry, packages: set[str]) -> bool:
        """Return whether a new file would be imported instead of an installed module, or whenever tests are."""
        path = entry.path
        folder, name = posixpath.split(path)
        if path in self._known or not name.endswith(".py"):
            return False
        if name == "__init__.py" and self._has_tests(folder):
            return True
        new = next(each for each in [*parents(path), path] if each not in self._known)
        return any(
            posixpath.basename(each).partition(".")[0] in self._installed
            for each in [*parents(path), path]
            if each.startswith(new) and posixpath.dirname(each) not in packages
        )

    def _has_tests(self, folder: str) -> bool:
        below = f"{folder}/" if folder else ""
        files = {*self._base, *self._exam}
        return any(path.startswith(below) and path.endswith(".py") and self._is_exam(path) for path in files)


def installed_modules(python_path: Iterable[str]) -> frozenset[str]:
    """Return the modules of Python's library and of folders with packages."""
    folders = [os.listdir(folder) for folder in python_path if os.path.isdir(folder)]
    found = {name.partition(".")[0] for names in folders for name in names}
    return sys.stdlib_module_names.union(found, MISSED_MODULES)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path, or the end of it after a slash, matches a pattern."""
    pattern = _compiled(tuple(patterns))
    return any(pattern.match(path, start) for start in [0, *(found.end() for found in re.finditer("/", path))])


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def _test_patterns(base: Iterable[TreeEntry], commands: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the patterns of test files that the repository's settings of pytest and the commands have."""
    for entry in base:
        if posixpath.basename(entry.path) in PYTEST_SETTINGS and entry.content is not None:
            for found in _PYTHON_FILES.findall(entry.content.decode(errors="replace")):
                yield from _PATTERN.findall(found)
    for command in commands:
        if {"unittest", "test"} & set(command):
            yield UNITTEST_FILES
        for option, value in pairwise(command):
            if option in ("-p", "--pattern") and "unittest" in command:
                yield value
            yield from (each for found in _PYTHON_FILES.findall(value) for each in _PATTERN.findall(found))


def _executed(commands: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the paths that a file may have which a command executes."""
    for command in commands:
        program, *arguments = command
        match arguments:
            case ["-m", "unittest", *names]:
                pass
            case ["-m", "pytest", *rest]:
                names = _named_by_pytest(rest)
            case ["-m", module, *_]:
                names = [module]
            case [file, *_] if posixpath.basename(program) in INTERPRETERS or is_python(command):
                names = [file]
            case _:
                names = [program, *(_named_by_pytest(arguments) if posixpath.basename(program) == "pytest" else [])]
        for name in names:
            yield posixpath.normpath(name.partition("::")[0])
            yield f"{name.replace('.', '/')}/__main__.py"
            parts = name.split(".")
            yield from ("/".join(parts[: end + 1]) + ".py" for end in range(len(parts)))


def _named_by_pytest(arguments: Sequence[str]) -> list[str]:
    """Return the files and plugins among the arguments of pytest."""
    plugins = [value for option, value in pairwise(arguments) if option == "-p"]
    return [*plugins, *(each for each in arguments if ".py" in each)]
