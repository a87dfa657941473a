"""Answers to the requests of a page: plain values for JSON, from the entries of a catalog.

Each answer is a function of the catalog and the parameters of a request, listed in `ANSWERS` by its name. The server
and the export call them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.evaluation.result import EvaluationResult, compare_results
from rl_launch.session.directory.remedies import command_to_go_on
from rl_launch.show.advice import advice
from rl_launch.show.comparison import differing_keys, effective_values
from rl_launch.show.condition import Condition
from rl_launch.show.report import failures_of, higher_is_better, timings_of
from rl_launch.show.terminal import PLOTTED
from rl_launch.view import logs, timelines
from rl_launch.view.catalog import Catalog, Entry
from rl_launch.view.index import EQUALS, RANGES, Line, Question
from rl_launch.view.metrics import AXES, Axis
from rl_launch.view.origins import config_values
from rl_launch.view.parameters import Parameters
from rl_launch.view.records import Matcher, bounded, previews, record_of
from rl_launch.view.tokens import tokens_of

Answer = dict[str, Any]

MOST_ROWS = 500
"""Maximum number of rollouts in one answer."""

MOST_SCANNED = 50_000
"""Maximum number of rollouts whose text one answer looks at."""

BUDGET_S = 1.0
"""Seconds after which an answer about many rollouts returns what it has, and where it stopped."""

_MOST_POINTS = 1500
_MOST_DIFFERING = 40


def runs(catalog: Catalog, given: Parameters) -> Answer:
    """Runs with state, progress, best value and the config keys in which they differ; evaluations and files."""
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
    keys = differing_keys(configs)[:_MOST_DIFFERING]
    for listed, config in zip(found, configs, strict=True):
        listed["values"] = {key: config.get(key) for key in keys}
    others = [{"id": each.id, "sort": each.sort} for each in entries if each.sort != "run"]
    return {"runs": found, "keys": keys, "others": others}


def _run(entry: Entry) -> Answer:
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


def run(catalog: Catalog, given: Parameters) -> Answer:
    """One run: its state, a summary of every metric, and which kinds and steps of rollouts there are."""
    entry = catalog[given.text("id")]
    metrics = entry.metrics
    found = metrics.summaries()
    names = {each.name for each in found}
    summaries = [{**asdict(each), "higher": higher_is_better(each.name, names)} for each in found]
    return {
        **_run(entry),
        "metrics": summaries,
        "headlines": [name for name in PLOTTED if name in names],
        "num_steps": len(metrics.steps),
        "kinds": _kinds(entry),
    }


def _kinds(entry: Entry) -> dict[str, Answer]:
    found = {kind: entry.steps(kind) for kind in entry.source.kinds()}
    return {kind: {"first": steps[0], "last": steps[-1], "count": len(steps)} for kind, steps in found.items() if steps}


def series(catalog: Catalog, given: Parameters) -> Answer:
    """Points of metrics of a run, thinned to the size of a plot."""
    metrics = catalog[given.text("id")].metrics
    by: Axis = given.choice("by", AXES)
    low, high = given.number("low", float("-inf")), given.number("high", float("inf"))
    most = given.integer("points", _MOST_POINTS, least=8, most=20_000)
    found = {name: metrics.points(name, by, low, high, most) for name in given.texts("name")}
    return {"series": {name: {"x": x, "y": y} for name, (x, y) in found.items()}}


def report(catalog: Catalog, given: Parameters) -> Answer:
    """Advice on a run as of `rl show`, with the metrics and the rollouts that show it."""
    entry = catalog[given.text("id")]
    rows = list(entry.metrics.rows())
    timings = timings_of(rows)
    found = advice(rows, timings, entry.run.config(), failures_of(entry.run, rows))
    steps = entry.steps("step")
    return {"advice": [asdict(each) for each in found], "timings": timings, "last_step": steps[-1] if steps else None}


def rollouts(catalog: Catalog, given: Parameters) -> Answer:
    """A page of rollouts that meet filters, newest step first unless sorted.

    Steps that the index does not have are added first, newest first, for at most `BUDGET_S`. `pending` is the number of
    steps that remain: the same request then continues. `next` is the offset of the next page; None at the end.
    """
    entry = catalog[given.text("id")]
    question, matcher = _question(entry, given)
    offset, limit = given.integer("offset", 0), given.integer("limit", 100, least=1, most=MOST_ROWS)
    deadline = time.monotonic() + BUDGET_S
    wanted = [step for step in entry.steps(question.kind) if question.first <= step <= question.last]
    pending = entry.index.extend(question.kind, reversed(wanted), deadline)
    if matcher.is_needed:
        rows, following = _matching(entry, question, matcher, offset, limit, deadline)
        count = None
    else:
        rows = entry.index.page(question, offset, limit)
        count = entry.index.count(question)
        following = offset + len(rows) if offset + len(rows) < count else None
        for row, record in zip(rows, _records(entry, rows), strict=True):
            row |= previews(record) if record is not None else {"prompt": "", "response": ""}
    return {
        "rows": rows,
        "next": following,
        "count": count,
        "pending": pending,
        "steps": len(wanted),
        "choices": entry.index.choices(question.kind, question.first, question.last),
    }


def _question(entry: Entry, given: Parameters) -> tuple[Question, Matcher]:
    kinds = entry.source.kinds()
    kind = given.choice("kind", tuple(kinds))
    steps = entry.steps(kind)
    newest = steps[-1] if steps else 0
    question = Question(
        kind=kind,
        first=given.integer("first", newest),
        last=given.integer("last", newest),
        equal={name: given.text(name) for name in EQUALS if given.has(name)},
        least={name: given.number(f"min_{name}", 0.0) for name in RANGES if given.has(f"min_{name}")},
        most={name: given.number(f"max_{name}", 0.0) for name in RANGES if given.has(f"max_{name}")},
        sort=given.text("sort", ""),
    )
    conditions = [Condition.parse(text, "where", "reward=0 or rewards.format>0") for text in given.texts("where")]
    return question, Matcher(given.text("text", ""), conditions)


def _matching(
    entry: Entry, question: Question, matcher: Matcher, offset: int, limit: int, deadline: float
) -> tuple[list[Answer], int | None]:
    """Rollouts from an offset whose records match, and the offset at which to continue."""
    found: list[Answer] = []
    end = offset + MOST_SCANNED
    while offset < end:
        rows = entry.index.page(question, offset, 2 * MOST_ROWS)
        if not rows:
            return found, None
        for row, record in zip(rows, _records(entry, rows), strict=True):
            offset += 1
            if record is not None and matcher.matches(record):
                found.append({**row, **previews(record)})
                if len(found) == limit:
                    return found, offset
        if time.monotonic() > deadline:
            break
    return found, offset


def _records(entry: Entry, rows: list[Answer]) -> list[dict[str, Any] | None]:
    lines = [Line(row["kind"], row["step"], row["row"], row["offset"], row["length"]) for row in rows]
    return [record_of(line) for line in entry.index.read(lines)]


def rollout(catalog: Catalog, given: Parameters) -> Answer:
    """One rollout, with its group and the other steps that have rollouts of its prompt."""
    entry = catalog[given.text("id")]
    line = _line(entry, given)
    record = record_of(entry.index.read([line])[0])
    if record is None:
        raise RunDirectoryError(f"line {line.row + 1} of step {line.step} is not a rollout; see the raw record")
    prompt_id = str(record.get("prompt_id") or "")
    equal = {"prompt_id": prompt_id}
    group = entry.index.page(Question(line.kind, line.step, line.step, equal, sort="position"), 0, MOST_ROWS)
    others = entry.index.same_prompt(line.kind, prompt_id, MOST_ROWS) if prompt_id else []
    return {
        "kind": line.kind,
        "step": line.step,
        "row": line.row,
        "bytes": line.length,
        "record": bounded(record),
        "group": group,
        "same_prompt": [{"step": step, "count": count, "reward": reward} for step, count, reward in others],
    }


def _line(entry: Entry, given: Parameters) -> Line:
    kind, step, row = given.text("kind"), given.integer("step", 0), given.integer("row", 0)
    line = entry.index.line(kind, step, row)
    if line is None:
        raise RunDirectoryError(f"{entry.id} has no rollout {row} of {kind} {step}")
    return line


def raw_rollout(catalog: Catalog, given: Parameters) -> bytes:
    """The line of one rollout as it is in the file."""
    entry = catalog[given.text("id")]
    return entry.index.read([_line(entry, given)])[0]


def tokens(catalog: Catalog, given: Parameters) -> Answer:
    """A page of the tokens of one rollout with their values, or why there are none."""
    entry = catalog[given.text("id")]
    line = _line(entry, given)
    record = record_of(entry.index.read([line])[0]) or {}
    return tokens_of(entry, line, record, given.integer("offset", 0, least=0))


def timeline(catalog: Catalog, given: Parameters) -> Answer:
    """Time by phase of each of some steps, idle shares, and events of the driver's log."""
    entry = catalog[given.text("id")]
    metrics = entry.metrics
    steps = list(metrics.steps)
    first, last = given.integer("first", steps[0] if steps else 0), given.integer("last", steps[-1] if steps else 0)
    most = given.integer("points", 400, least=1, most=2000)
    chosen = [position for position, step in enumerate(steps) if first <= step <= last]
    size = max(1, -(-len(chosen) // most))
    names = [name for name in metrics.columns if name.startswith(("time/", "idle/")) or name in _GAUGES]
    parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    columns = {name: [_mean(metrics.columns[name], part) for part in parts] for name in names}
    return {
        "steps": [[steps[part[0]], steps[part[-1]]] for part in parts],
        "columns": columns,
        "events": [asdict(each) for each in logs.events(entry.logs)],
    }


_GAUGES = ("generation/replicas", "weight_version", "staleness/mean", "queue/finished", "rollout/failed")


def _mean(column: Any, positions: list[int]) -> float | None:
    values = [column[at] for at in positions if at < len(column) and column[at] == column[at]]
    return sum(values) / len(values) if values else None


def config(catalog: Catalog, given: Parameters) -> Answer:
    """Every key of a run's config with its value and where that comes from; with `other`, the values of another run."""
    entry = catalog[given.text("id")]
    values = config_values(entry.run)
    other = config_values(catalog[given.text("other")].run) if given.has("other") else None
    keys = list(dict.fromkeys([*values, *(other or {})]))
    return {
        "values": [
            {
                "key": key,
                **asdict_or_empty(values.get(key)),
                **({} if other is None else {"other": other[key].value if key in other else None}),
            }
            for key in keys
        ]
    }


def asdict_or_empty(value: Any) -> Answer:
    """Return the fields of a value of a config; those of a missing one are null."""
    return {"value": None, "origin": ""} if value is None else asdict(value)


def checkpoints(catalog: Catalog, given: Parameters) -> Answer:
    """The checkpoints of a run, newest first, with the metrics that rank them."""
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


def log_list(catalog: Catalog, given: Parameters) -> Answer:
    """The logs of a run or an evaluation, the most recently written first."""
    return {"logs": [asdict(each) for each in logs.log_files(catalog[given.text("id")].logs)]}


def log(catalog: Catalog, given: Parameters) -> Answer:
    """A part of a log from a position, or its end."""
    start = given.integer("start", 0) if given.has("start") else None
    return asdict(logs.log_part(catalog[given.text("id")].logs, given.text("name"), start))


def evaluations(catalog: Catalog, given: Parameters) -> Answer:
    """Evaluations with the estimates of every task; with `first` and `second`, their comparison by task."""
    found: list[Answer] = []
    for entry in (each for each in catalog.entries() if each.sort == "evaluation"):
        try:
            result = EvaluationResult.read(entry.path)
        except ConfigError as error:
            found.append({"id": entry.id, "model": "", "tasks": {}, "problem": str(error)})
            continue
        tasks = {name: asdict(summary) for name, summary in result.tasks.items()}
        found.append(
            {"id": entry.id, "model": result.model, "tasks": tasks, "confidence": result.confidence, "problem": ""}
        )
    comparison = None
    if given.has("first") and given.has("second"):
        results = [EvaluationResult.read(catalog[given.text(each)].path) for each in ("first", "second")]
        compared = compare_results(*results)
        comparison = {name: {**asdict(each), "is_significant": each.is_significant} for name, each in compared.items()}
    return {"evaluations": found, "comparison": comparison}


ANSWERS: Mapping[str, Callable[[Catalog, Parameters], Answer]] = {
    "runs": runs,
    "run": run,
    "series": series,
    "report": report,
    "rollouts": rollouts,
    "rollout": rollout,
    "tokens": tokens,
    "timeline": timeline,
    "processes": timelines.processes,
    "spans": timelines.spans,
    "profiles": timelines.profiles,
    "config": config,
    "checkpoints": checkpoints,
    "logs": log_list,
    "log": log,
    "evaluations": evaluations,
}
"""Functions by the name of the request."""
