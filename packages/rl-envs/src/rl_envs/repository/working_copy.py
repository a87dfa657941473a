"""Working copies: the files of a repository, and files that are laid over them."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rl_core.errors import RLError
from rl_envs.repository.task import RepositoryTask
from rl_envs.sandbox import tree
from rl_envs.sandbox.program import Cancellation, Limits, Program
from rl_envs.sandbox.runner import Runner
from rl_envs.sandbox.tree import TreeEntry

GIT_TIMEOUT_S = 300.0
"""Maximum number of seconds that git may take to read a repository."""
MAX_KEPT = 64
"""Maximum number of repositories whose files are kept in memory."""


class RepositoryUnreadable(RLError):
    """Raised if a repository cannot be read."""


class ImageFiles(NamedTuple):
    """The part of an image that a task needs.

    Args:
        entries: Files of its repository; empty if the row has the repository.
        modules: Names of the modules that its Python imports.
    """

    entries: tuple[TreeEntry, ...]
    modules: frozenset[str]


_LIST_MODULES = "import pkgutil, sys; print(*{each.name for each in pkgutil.iter_modules()}, *sys.builtin_module_names)"


class Repositories:
    """Reads repositories, and keeps the files of those that were used last.

    Args:
        max_bytes: Maximum number of bytes of one repository's files.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[Path, str], tuple[TreeEntry, ...]] = {}
        self._images: dict[tuple[str, str], ImageFiles] = {}
        self._locks: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def in_image(self, task: RepositoryTask, runner: Runner, limits: Limits, cancellation: Cancellation) -> ImageFiles:
        """Return what the image of a task has: its repository, without the history, and the modules of its Python.

        Raises:
            RepositoryUnreadable: If the image has no Python or no such folder, or the folder is too large.
        """
        key = (task.image, task.image_folder)
        with self._locks[key]:
            found = self._images.pop(key, None)
            if found is None:
                command = ("python", "-c", _LIST_MODULES)
                program = Program(command=command, snapshot=task.image_folder or None, image=task.image)
                outcome = runner.run(program, limits, cancellation)
                try:
                    if problem := outcome.snapshot_problem or ("" if outcome.ok else outcome.describe(limits)):
                        raise tree.UnusableTree(problem)
                    entries = tree.unpack(outcome.snapshot, self._max_bytes) if task.image_folder else []
                except tree.UnusableTree as error:
                    raise RepositoryUnreadable(
                        f"{task.image_folder} of the image {task.image} cannot be used: {error}; the limit is "
                        "env.repository.sandbox.scratch_mib"
                    ) from None
                files = tuple(each for each in entries if each.content is not None or each.link)
                found = ImageFiles(files, frozenset(outcome.stdout.decode(errors="replace").split()))
            self._images[key] = found
        while len(self._images) > MAX_KEPT:
            self._images.pop(next(iter(self._images)), None)
        return found

    def entries(self, task: RepositoryTask) -> tuple[TreeEntry, ...]:
        """Return the files of a repository, without its history.

        Raises:
            RepositoryUnreadable: If it cannot be read, or is too large.
        """
        if task.source is None:
            return tuple(TreeEntry(path, text.encode()) for path, text in task.files.items())
        key = (task.source, task.commit)
        found = self._kept.pop(key, None)
        if found is None:
            found = self._read(*key)
        self._kept[key] = found
        while len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))
        return found

    def _read(self, source: Path, commit: str) -> tuple[TreeEntry, ...]:
        try:
            if source.is_dir() and not commit:
                found = list(tree.read(str(source), self._max_bytes, left_out=frozenset({".git", "__pycache__"})))
            else:
                with tempfile.TemporaryDirectory(prefix="rl-repository-") as folder:
                    if source.is_dir():
                        folder = str(source)
                    else:
                        _git("clone", "--quiet", "--bare", str(source.absolute()), folder)
                    archive = _git("-C", folder, "archive", "--format=tar", commit or "HEAD")
                found = tree.unpack(archive, self._max_bytes)
        except (tree.UnusableTree, OSError) as error:
            raise RepositoryUnreadable(
                f"the repository {source} cannot be used: {error}; the limit is env.repository.sandbox.scratch_mib"
            ) from None
        return tuple(each for each in found if each.content is not None or each.link)


def overlaid(entries: Iterable[TreeEntry], files: Iterable[TreeEntry]) -> list[TreeEntry]:
    """Return entries with further files laid over them; entries that are in the way of one are left out."""
    laid = list(files)
    paths = {entry.path for entry in laid}
    folders = {parent for path in paths for parent in tree.parents(path)}
    kept = [
        entry
        for entry in entries
        if entry.path not in paths and entry.path not in folders and not paths.intersection(tree.parents(entry.path))
    ]
    return [*kept, *laid]


def _git(*arguments: str) -> bytes:
    # These options keep a repository's own settings and hooks from running.
    command = ["git", "-c", "core.fsmonitor=false", "-c", "safe.directory=*", *arguments]
    try:
        return subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=True).stdout
    except FileNotFoundError:
        raise RepositoryUnreadable(
            "git is not installed, and reads bundles and commits; install it, or use a folder without `commit`"
        ) from None
    except subprocess.TimeoutExpired:
        raise RepositoryUnreadable(f"git took longer than {GIT_TIMEOUT_S:g} s for {arguments[-1]}") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()[-300:]
        raise RepositoryUnreadable(f"git could not read a repository: {said}") from None
