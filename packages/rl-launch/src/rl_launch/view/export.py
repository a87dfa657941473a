"""`rl view --export`: the page with its answers as static files, which open from `file://`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, RLError
from rl_launch.view import static_files, timelines
from rl_launch.view.answers import ANSWERS
from rl_launch.view.catalog import CatalogEntry, PageCatalog
from rl_launch.view.parameters import Parameters
from rl_launch.view.server import as_json
from rl_launch.view.tokens import recorded_in

INDEX = "data/index.js"
"""Names of the files with answers, by request."""

MARKER = ".rl-view"
"""File that marks the folder of an export, so that it can be made again."""


def export(catalog: PageCatalog, folder: Path, *, steps: int = 8, rollouts: int = 64, tokens: int = 8) -> int:
    """Write the page and its answers into a folder.

    Args:
        catalog: PageCatalog to export.
        folder: A new or empty folder, or an earlier export.
        steps: Number of steps of each kind whose rollouts are exported: the first, the last, and others at equal
            distances.
        rollouts: Number of rollouts of each of these steps, at most `MAX_ROWS`.
        tokens: Number of rollouts of each of these steps whose first tokens are exported with their values.

    Returns:
        Number of exported rollouts.

    Raises:
        ConfigError: If the folder holds something else.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARKER).is_file())):
        raise ConfigError(f"--export: {folder} is not empty. Choose a new folder.")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("made by rl view --export\n")
    for earlier in (folder / "data").glob("*.js"):
        earlier.unlink()
    for name in static_files.names():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(static_files.content(name))
    shown: dict[str, dict[str, list[int]]] = {}
    for entry in catalog.entries():
        shown[entry.id] = {kind: chosen(entry.steps(kind), steps) for kind in entry.source.kinds}
        traced = timelines.traced_steps(entry.path) if entry.sort == "run" else []
        shown[entry.id]["spans"] = chosen(traced, steps)
    requests: list[tuple[str, Mapping[str, Any]]] = [("runs", {}), ("evaluations", {}), ("servers", {})]
    requests += [each for entry in catalog.entries() for each in _requests(entry, catalog, shown, rollouts, tokens)]
    names: dict[str, str] = {}
    num_rollouts = 0
    for name, given in requests:
        # the key of a request is made in the same way by `core.js`
        pairs = [[each, str(value)] for each, value in sorted(given.items())]
        key = json.dumps([name, pairs], ensure_ascii=False, separators=(",", ":"))
        try:
            answer = _answer(name, catalog, given)
        except RLError:
            continue  # such as a run without checkpoints' files
        num_rollouts += name == "rollout"
        names[key] = f"a{len(names)}"
        _write(folder / "data" / f"{names[key]}.js", f"RlViewExport.receive({json.dumps(names[key])}, ", answer)
    index = {"names": names, "limit": rollouts, "tokens": tokens, "steps": shown}
    _write(folder / INDEX, "globalThis.RlViewExport = (", index)
    (folder / "index.html").write_bytes(static_files.page(data_script=INDEX))
    return num_rollouts


def _requests(
    entry: CatalogEntry, catalog: PageCatalog, shown: Mapping[str, Mapping[str, list[int]]], rollouts: int, tokens: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the requests about an entry that an export answers, with the parameters that the page sends."""
    if entry.sort == "run":
        for name in ("run", "report", "timeline", "processes", "profiles", "config", "checkpoints"):
            yield name, {"id": entry.id}
        for step in shown[entry.id]["spans"]:
            yield "spans", {"id": entry.id, "step": step}
        for by in ("step", "time", "tokens"):
            for metric in entry.metrics.columns:
                yield "series", {"id": entry.id, "by": by, "name": metric}
    yield "logs", {"id": entry.id}
    for log in _answer("logs", catalog, {"id": entry.id})["logs"]:
        yield "log", {"id": entry.id, "name": log["name"]}
    for kind in entry.source.kinds:
        for step in shown[entry.id][kind]:
            page = {"id": entry.id, "kind": kind, "first": step, "last": step, "limit": rollouts}
            yield "rollouts", page
            rows = [row["row"] for row in _answer("rollouts", catalog, page)["rows"]]
            places = [{"id": entry.id, "kind": kind, "step": step, "row": row} for row in rows]
            yield from (("rollout", place) for place in places)
            recorded = {each.number for each in recorded_in(entry, kind, step)}
            with_tokens = [place for place in places if place["row"] in recorded]
            yield from (("tokens", place) for place in with_tokens[:tokens])


def _answer(name: str, catalog: PageCatalog, given: Mapping[str, Any]) -> dict[str, Any]:
    return ANSWERS[name](catalog, Parameters({each: [str(value)] for each, value in given.items()}))


def chosen(steps: Sequence[int], most: int) -> list[int]:
    """Return some steps at equal distances, the first and the last among them.

    Args:
        steps: All steps in order.
        most: Maximum number of steps; 0 for none.
    """
    if len(steps) <= most:
        return list(steps)
    if most <= 1:
        return list(steps[-most:]) if most else []
    return [steps[round(at * (len(steps) - 1) / (most - 1))] for at in range(most)]


def _write(path: Path, before: str, answer: Any) -> None:
    # separators that end a line in JavaScript of earlier standards
    text = as_json(answer).decode().replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    path.write_text(f"{before}{text});\n", encoding="utf-8")
