"""The runs, evaluations, servers and files of rollouts that a page shows, each with an id for requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from rl_core.errors import RunDirectoryError
from rl_launch.evaluation.folder import RESULT, is_evaluation
from rl_launch.run_session.directory.run_folder import RunFolder, find_runs, is_run
from rl_launch.run_session.directory.served import is_served
from rl_launch.view.index import RolloutIndex, RunRollouts, SingleFile
from rl_launch.view.metrics import FollowedMetrics

Sort = Literal["run", "evaluation", "server", "file"]

ROLLOUTS = "rollouts.jsonl"
"""Rollouts of an evaluation."""

_MAX_DEPTH = 3
_RESCAN_S = 2.0


class CatalogEntry:
    """Something to show, with the parts of it that are kept between requests. Any thread may use it.

    Args:
        id: Its name in requests and addresses.
        path: Its folder or file.
        sort: Kind of the entry.
        cache: Folder of the indexes; None to keep them in memory.
    """

    def __init__(self, id: str, path: Path, sort: Sort, cache: Path | None) -> None:
        self.id, self.path, self.sort = id, path, sort
        self.logs = path / "logs"
        self._cache = cache
        self._lock = threading.Lock()
        self._metrics: FollowedMetrics | None = None

    @cached_property
    def run(self) -> RunFolder:
        """The run.

        Raises:
            RunDirectoryError: If it is something else, or its folder is gone.
        """
        if self.sort != "run":
            raise RunDirectoryError(f"{self.id} is not a run")
        return RunFolder(self.path)

    @cached_property
    def source(self) -> RunRollouts | SingleFile:
        """Its files of rollouts."""
        if self.sort in ("run", "server"):
            return RunRollouts(self.path / "rollouts")
        return SingleFile(self.path / ROLLOUTS if self.sort == "evaluation" else self.path, self.sort)

    @cached_property
    def index(self) -> RolloutIndex:
        """The index of its rollouts."""
        with self._lock:
            return RolloutIndex(self.source, self._cache)

    def steps(self, kind: str) -> list[int]:
        """Return the steps that have rollouts of a kind, in order."""
        return list(self.source.stamps(kind))

    @property
    def metrics(self) -> FollowedMetrics:
        """The metrics of a run, as of now."""
        with self._lock:
            if self._metrics is None:
                self._metrics = FollowedMetrics(self.path / "metrics.jsonl")
        self._metrics.update()
        return self._metrics


class PageCatalog:
    """The contents of some folders, found again every few seconds.

    Args:
        roots: Runs, evaluations, files of rollouts, and folders that contain them.
        cache: Folder of the indexes; None to keep them in memory.

    Raises:
        RunDirectoryError: If one of the roots does not exist, or is a file of another type.
    """

    def __init__(self, roots: Sequence[Path], cache: Path | None = None) -> None:
        self._roots = [root.expanduser() for root in roots]
        for root in self._roots:
            if not root.exists():
                raise RunDirectoryError(f"{root} does not exist. Pass runs, evaluations or folders that contain them.")
            if root.is_file() and root.suffix != ".jsonl":
                raise RunDirectoryError(f"{root} is not a folder, nor a file of rollouts (.jsonl).")
        self._cache = cache
        self._lock = threading.Lock()
        self._entries: dict[str, CatalogEntry] = {}
        self._scanned = -_RESCAN_S
        self.entries()

    def entries(self) -> list[CatalogEntry]:
        """Return everything that is there, in the order of the paths."""
        with self._lock:
            if time.monotonic() - self._scanned >= _RESCAN_S:
                known = self._entries
                self._entries = {
                    id: known.get(id) or CatalogEntry(id, path, sort, self._cache) for id, path, sort in self._find()
                }
                for id, entry in known.items():
                    if id not in self._entries and "index" in vars(entry):
                        entry.index.close()
                self._scanned = time.monotonic()
            return list(self._entries.values())

    def __getitem__(self, id: str) -> CatalogEntry:
        """Return the entry with this id.

        Raises:
            RunDirectoryError: If there is none.
        """
        for entry in self.entries():
            if entry.id == id:
                return entry
        raise RunDirectoryError(f"there is no run, evaluation or file {id!r} in the folders of this page")

    def _find(self) -> Iterator[tuple[str, Path, Sort]]:
        used: set[str] = set()
        several = len(self._roots) > 1
        for root in self._roots:
            found: list[tuple[Path, Sort]] = [(root, "file")]
            if not root.is_file():
                found = [(run.path, "run") for run in find_runs(root)]
                found += [(path, "evaluation") for path in sorted(_below(root, _MAX_DEPTH, _is_evaluation))]
                found += [(path, "server") for path in sorted(_below(root, _MAX_DEPTH, is_served))]
            for path, sort in found:
                below = os.path.relpath(path, root)
                whole = root.absolute().name
                id = whole if below == "." else f"{whole}/{below}" if several else below
                unique, number = id, 1
                while unique in used:
                    number += 1
                    unique = f"{id}~{number}"
                used.add(unique)
                yield unique, path, sort


def _is_evaluation(folder: Path) -> bool:
    return is_evaluation(folder) or (folder / RESULT).is_file()


def _below(folder: Path, depth: int, is_one: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the folders of a kind, which are not looked for within one another or within runs."""
    if is_one(folder):
        yield folder
    elif depth and not is_run(folder):
        try:
            below = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[:1] != "."]
        except PermissionError:
            return
        for path in below:
            yield from _below(path, depth - 1, is_one)
