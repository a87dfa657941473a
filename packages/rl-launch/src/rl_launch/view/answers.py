"""Answers to the requests of a page: plain values for JSON, from the entries of a catalog.

Each answer is a function of the catalog and the parameters of a request, listed in `ANSWERS` by its name. The server
and the export call them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rl_core.config import load
from rl_core.config.tree import format_path, leaves
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.evaluation.result import EvaluationResult, compare_results
from rl_launch.run_session.directory.recording import read_origins
from rl_launch.run_session.directory.remedies import command_to_go_on
from rl_launch.run_session.directory.run_folder import CONFIG, RunFolder, timings_of
from rl_launch.run_session.directory.served import read_status, steps_over_time
from rl_launch.show.advice import acted, advice
from rl_launch.show.comparison import differing_keys, effective_values
from rl_launch.show.report import failures_of, higher_is_better
from rl_launch.show.terminal import PLOTTED
from rl_launch.view import logs, rollouts, timelines, tokens
from rl_launch.view.catalog import CatalogEntry, PageCatalog
from rl_launch.view.metrics import AXES, Axis
from rl_launch.view.parameters import Parameters

Answer = dict[str, Any]

_MAX_POINTS = 1500
_MAX_DIFFERING = 40
_MAX_SERVER_LINES = 400
_GAUGES = ("generation/replicas", "weight_version", "staleness/mean", "queue/finished", "rollout/failed")


def runs(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the runs: state, progress, best value and the keys in which they differ; evaluations and files."""
    entries = catalog.entries()
    configs: list[dict[str, Any]] = []
    found = []
    for entry in (each for each in entries if each.sort == "run"):
        try:
            answer, config = _run(entry), effective_values(entry.run.config())
        except (OSError, RunDirectoryError):
            continue  # removed meanwhile, or it cannot be read
        found.append(answer)
        configs.append(config)
    keys = differing_keys(configs)[:_MAX_DIFFERING]
    for listed, config in zip(found, configs, strict=True):
        listed["values"] = {key: config.get(key) for key in keys}
    others = [{"id": each.id, "sort": each.sort} for each in entries if each.sort != "run"]
    return {"runs": found, "keys": keys, "others": others}


def _run(entry: CatalogEntry) -> Answer:
    run = entry.run
    description, state = run.description(), run.state()
    return {
        "id": entry.id,
        "algorithm": description.algorithm,
        "model": description.model,
        "created": description.created,
        "origin": dict(description.origin),
        "versions": dict(description.versions),
        "labels": description.labels.as_json(),
        "status": state.status,
        "reason": state.reason,
        "step": state.step,
        "max_steps": state.max_steps,
        "best": asdict(state.best) if state.best else None,
        "changed": run.changed_at().isoformat(timespec="seconds"),
        "resume": command_to_go_on(str(run.path), state),
    }


def run(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with one run: its state, a summary of every metric, and which kinds and steps of rollouts there are."""
    entry = catalog[given.text("id")]
    metrics = entry.metrics
    found = metrics.summaries()
    names = {each.name for each in found}
    kinds = {kind: steps for kind in entry.source.kinds if (steps := entry.steps(kind))}
    return {
        **_run(entry),
        "metrics": [{**asdict(each), "higher": higher_is_better(each.name, names)} for each in found],
        "headlines": [name for name in PLOTTED if name in names],
        "num_steps": len(metrics.steps),
        "kinds": {kind: {"first": at[0], "last": at[-1], "count": len(at)} for kind, at in kinds.items()},
    }


def series(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with points of metrics of a run, thinned to the size of a plot."""
    metrics = catalog[given.text("id")].metrics
    by: Axis = given.choice("by", AXES)
    low, high = given.number("low", float("-inf")), given.number("high", float("inf"))
    most = given.integer("points", _MAX_POINTS, least=8, most=20_000)
    found = {name: metrics.points(name, by, low, high, most) for name in given.texts("name")}
    return {"series": {name: {"x": x, "y": y} for name, (x, y) in found.items()}}


def report(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the advice on a run that `rl show` gives, and the metrics and rollouts behind it."""
    entry = catalog[given.text("id")]
    rows = list(entry.metrics.rows())
    timings = timings_of(rows)
    found = [*acted(entry.run.path), *advice(rows, timings, entry.run.config(), failures_of(entry.run, rows))]
    steps = entry.steps("step")
    return {"advice": [asdict(each) for each in found], "timings": timings, "last_step": steps[-1] if steps else None}


def timeline(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the time by phase of each of some steps, idle shares, and events of the driver's log."""
    entry = catalog[given.text("id")]
    metrics = entry.metrics
    steps = list(metrics.steps)
    first, last = given.integer("first", steps[0] if steps else 0), given.integer("last", steps[-1] if steps else 0)
    most = given.integer("points", 400, least=1, most=2000)
    chosen = [position for position, step in enumerate(steps) if first <= step <= last]
    size = max(1, -(-len(chosen) // most))
    names = [name for name in metrics.columns if name.startswith(("time/", "idle/")) or name in _GAUGES]
    parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]

    def mean(column: Any, positions: list[int]) -> float | None:
        values = [column[at] for at in positions if at < len(column) and column[at] == column[at]]
        return sum(values) / len(values) if values else None

    return {
        "steps": [[steps[part[0]], steps[part[-1]]] for part in parts],
        "columns": {name: [mean(metrics.columns[name], part) for part in parts] for name in names},
        "events": logs.events(entry.logs),
    }


def config(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with every key of a run's config, its value and origin; with `other`, the values of another run."""
    values = _config_values(catalog[given.text("id")].run)
    other = _config_values(catalog[given.text("other")].run) if given.has("other") else None
    found = []
    for key in dict.fromkeys([*values, *(other or {})]):
        answer = {"key": key, **values.get(key, {"value": None, "origin": ""})}
        if other is not None:
            answer["other"] = other[key]["value"] if key in other else None
        found.append(answer)
    return {"values": found}


def _config_values(run: RunFolder) -> dict[str, Answer]:
    """Return the values of a run's config by dotted key; empty if its file cannot be read.

    The origin of a value is its file and line, `command line` or `default` if the run has recorded it; otherwise the
    place in the `config.yaml` of the run.
    """
    try:
        raw = load(run.path / CONFIG)
    except ConfigError:
        return {}
    recorded, found = read_origins(run.path), {}
    for path, value in leaves(raw.plain()).items():
        key = format_path(path)
        line = raw.entry.origin_at(path).line
        found[key] = {"value": value, "origin": recorded.get(key) or (CONFIG if line is None else f"{CONFIG}:{line}")}
    return found


def checkpoints(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the checkpoints of a run, newest first, and the metrics that rank them."""
    run_folder = catalog[given.text("id")].run
    best = run_folder.best_checkpoint()
    found = [
        {
            "step": each.step,
            "path": str(each.path),
            "exports": sorted(path.name for path in each.path.iterdir() if path.is_dir()),
            "metrics": dict(each.metrics),
            "is_best": best is not None and best.step == each.step,
            "changed": each.path.stat().st_mtime,
        }
        for each in reversed(run_folder.checkpoints())
    ]
    return {"checkpoints": found}


def evaluations(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the estimates of every task of the evaluations; with `first` and `second`, their comparison."""
    found: list[Answer] = []
    for entry in (each for each in catalog.entries() if each.sort == "evaluation"):
        try:
            result = EvaluationResult.read(entry.path)
        except ConfigError as error:
            found.append({"id": entry.id, "model": "", "tasks": {}, "problem": str(error)})
            continue
        tasks = {name: asdict(summary) for name, summary in result.tasks.items()}
        answer = {"id": entry.id, "model": result.model, "tasks": tasks, "confidence": result.confidence, "problem": ""}
        found.append(answer)
    comparison = None
    if given.has("first") and given.has("second"):
        results = [EvaluationResult.read(catalog[given.text(each)].path) for each in ("first", "second")]
        compared = compare_results(*results)
        comparison = {name: {**asdict(each), "is_significant": each.is_significant} for name, each in compared.items()}
    return {"evaluations": found, "comparison": comparison}


def servers(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the servers of training steps: the numbers of each tenant now, and its optimizer steps over time."""
    found: list[Answer] = []
    for entry in (each for each in catalog.entries() if each.sort == "server"):
        try:
            status = read_status(entry.path)
        except RunDirectoryError as error:
            found.append({"id": entry.id, "time": 0, "base_model": "", "tenants": [], "problem": str(error)})
            continue
        tenants = [{"name": name, **numbers} for name, numbers in status["tenants"].items()]
        over_time = steps_over_time(entry.path, _MAX_SERVER_LINES)
        answer = {"id": entry.id, "time": status["time"], "base_model": status["base_model"], "problem": ""}
        found.append({**answer, "tenants": tenants, "over_time": over_time})
    return {"servers": found}


ANSWERS: Mapping[str, Callable[[PageCatalog, Parameters], Answer]] = {
    "runs": runs,
    "run": run,
    "series": series,
    "report": report,
    "rollouts": rollouts.rollouts,
    "rollout": rollouts.rollout,
    "tokens": tokens.tokens,
    "timeline": timeline,
    "processes": timelines.processes,
    "spans": timelines.spans,
    "profiles": timelines.profiles,
    "config": config,
    "checkpoints": checkpoints,
    "logs": logs.log_list,
    "log": logs.log,
    "evaluations": evaluations,
    "servers": servers,
}
"""Functions by the name of the request."""
