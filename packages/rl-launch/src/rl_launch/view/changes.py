"""Changes of the files that a page shows, found by looking at their sizes and times."""

from __future__ import annotations

import os
from typing import Any

from rl_launch.view.catalog import Catalog, Entry

_FILES = (
    "metrics.jsonl",
    "state.json",
    "run.json",
    "rollouts",
    "checkpoints",
    "logs/driver.log",
    "traces",
    "profiles",
    "rollouts.jsonl",
    "eval.json",
)
"""Files and folders of an entry whose changes a page shows. A page that shows another log asks for it by itself."""


class Changes:
    """What has changed in a catalog since the last look.

    Args:
        catalog: Catalog to look at.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._seen = self._look()

    def since_last(self) -> dict[str, Any]:
        """Return the ids of entries that have changed, with the names of their files that did, and whether entries came
        or went; empty if nothing has changed.
        """
        now = self._look()
        changed = {
            id: [name for name, stamp in files.items() if self._seen[id].get(name) != stamp]
            for id, files in now.items()
            if id in self._seen and self._seen[id] != files
        }
        has_others = now.keys() != self._seen.keys()
        self._seen = now
        return {"changed": changed, "list": has_others} if changed or has_others else {}

    def _look(self) -> dict[str, dict[str, tuple[int, int]]]:
        return {entry.id: _stamps(entry) for entry in self._catalog.entries()}


def _stamps(entry: Entry) -> dict[str, tuple[int, int]]:
    found = {}
    names = _FILES if entry.sort != "file" else ("",)
    for name in names:
        try:
            facts = os.stat(entry.path / name if name else entry.path)
        except OSError:
            continue
        found[name] = (facts.st_size, facts.st_mtime_ns)
    return found
