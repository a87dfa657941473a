"""`rl view --export`: the page with its answers as static files, which open from `file://`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, RLError
from rl_launch.view import static_files, timelines
from rl_launch.view.answers import ANSWERS
from rl_launch.view.catalog import Catalog, Entry
from rl_launch.view.parameters import Parameters
from rl_launch.view.server import as_json
from rl_launch.view.tokens import recorded_in

INDEX = "data/index.js"
"""Names of the files with answers, by request."""

MARKER = ".rl-view"
"""File in an export that says what made the folder, so that it can be made again."""


@dataclass(frozen=True)
class Limits:
    """Limits of an export.

    Args:
        steps: Number of steps of each kind whose rollouts are exported: the first, the last, and others at equal
            distances.
        rollouts: Number of rollouts of each of these steps, at most `MOST_ROWS`.
        tokens: Number of rollouts of each of these steps whose first tokens are exported with their values.
    """

    steps: int = 8
    rollouts: int = 64
    tokens: int = 8


def export(catalog: Catalog, folder: Path, limits: Limits = Limits()) -> int:
    """Write the page and its answers into a folder.

    Args:
        catalog: Catalog to export.
        folder: A new or empty folder, or an earlier export.
        limits: Limits of the rollouts.

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
    names: dict[str, str] = {}
    num_rollouts = 0
    for name, given in _requests(catalog, limits):
        key = _key(name, given)
        try:
            answer = ANSWERS[name](catalog, Parameters({each: [str(value)] for each, value in given.items()}))
        except RLError:
            continue  # such as a run without checkpoints' files
        num_rollouts += name == "rollout"
        names[key] = f"a{len(names)}"
        _write(folder / "data" / f"{names[key]}.js", f"RlViewExport.receive({json.dumps(names[key])}, ", answer)
    steps = {each.id: _steps(each, limits) | {"spans": _traced_steps(each, limits)} for each in catalog.entries()}
    index = {"names": names, "limit": limits.rollouts, "tokens": limits.tokens, "steps": steps}
    _write(folder / INDEX, "globalThis.RlViewExport = (", index)
    (folder / "index.html").write_bytes(static_files.page(data_script=INDEX))
    return num_rollouts


def _requests(catalog: Catalog, limits: Limits) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The requests of a page that an export answers, with the parameters that the page sends."""
    yield "runs", {}
    yield "evaluations", {}
    for entry in catalog.entries():
        yield from _requests_of(entry, catalog, limits)


def _requests_of(entry: Entry, catalog: Catalog, limits: Limits) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if entry.sort == "run":
        for name in ("run", "report", "timeline", "processes", "profiles", "config", "checkpoints"):
            yield name, {"id": entry.id}
        for step in _traced_steps(entry, limits):
            yield "spans", {"id": entry.id, "step": step}
        for by in ("step", "time", "tokens"):
            for metric in entry.metrics.columns:
                yield "series", {"id": entry.id, "by": by, "name": metric}
    yield "logs", {"id": entry.id}
    for log in ANSWERS["logs"](catalog, Parameters({"id": [entry.id]}))["logs"]:
        yield "log", {"id": entry.id, "name": log["name"]}
    for kind, steps in _steps(entry, limits).items():
        for step in steps:
            page = {"id": entry.id, "kind": kind, "first": step, "last": step, "limit": limits.rollouts}
            yield "rollouts", page
            listed = ANSWERS["rollouts"](catalog, Parameters({name: [str(value)] for name, value in page.items()}))
            places = [{"id": entry.id, "kind": kind, "step": step, "row": row["row"]} for row in listed["rows"]]
            yield from (("rollout", place) for place in places)
            recorded = {each.number for each in recorded_in(entry, kind, step)}
            with_tokens = [place for place in places if place["row"] in recorded]
            yield from (("tokens", place) for place in with_tokens[: limits.tokens])


def _traced_steps(entry: Entry, limits: Limits) -> list[int]:
    """The steps whose spans are exported."""
    return chosen(timelines.traced_steps(entry.path), limits.steps) if entry.sort == "run" else []


def _steps(entry: Entry, limits: Limits) -> dict[str, list[int]]:
    """The steps whose rollouts are exported, by kind."""
    return {kind: chosen(entry.steps(kind), limits.steps) for kind in entry.source.kinds()}


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


def _key(name: str, given: Mapping[str, Any]) -> str:
    """The name of a request in `INDEX`, made in the same way as by `core.js`."""
    pairs = [[each, str(value)] for each, value in sorted(given.items())]
    return json.dumps([name, pairs], ensure_ascii=False, separators=(",", ":"))


def _write(path: Path, before: str, answer: Any, after: str = ")") -> None:
    # a separator that ends a line in JavaScript of earlier standards
    text = as_json(answer).decode().replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    path.write_text(f"{before}{text}{after};\n", encoding="utf-8")
