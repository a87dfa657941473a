"""Answers about rollouts: pages of them, and one as a page shows it, with bounded texts."""

from __future__ import annotations

import json
import time
from typing import Any

from rl_core.config.tree import mapped
from rl_core.errors import RunDirectoryError
from rl_core.rollouts.record import segments_of, turns_of
from rl_launch.run_session.directory.row_files import text_of_content
from rl_launch.show.selection import Condition, RecordValues, response_of
from rl_launch.view.catalog import CatalogEntry, PageCatalog
from rl_launch.view.index import EQUALS, RANGES, RolloutLine, RolloutQuery
from rl_launch.view.parameters import Parameters

MAX_ROWS = 500
"""Maximum number of rollouts in one answer."""

MAX_SCANNED = 50_000
"""Maximum number of rollouts whose text one answer looks at."""

MAX_CHARACTERS = 200_000
"""Maximum length of a string in a record; the raw record has the whole of it."""

BUDGET_S = 1.0
"""Time limit in seconds of an answer about many rollouts, which then has the rollouts found so far."""

_PREVIEW = 160


def rollouts(catalog: PageCatalog, given: Parameters) -> dict[str, Any]:
    """Answer with a page of rollouts that meet filters, newest step first unless sorted.

    Steps that the index does not have are added first, newest first, for at most `BUDGET_S`. `pending` is the number of
    steps that remain: the same request then continues. `next` is the offset of the next page; None at the end.

    `text` must be in the prompt, the response, an observation or the reason of the failure, in any case. `where` are
    conditions as of `rl show --where`, which must all hold.
    """
    entry = catalog[given.text("id")]
    kind = given.choice("kind", entry.source.kinds)
    newest = (entry.steps(kind) or [0])[-1]
    question = RolloutQuery(
        kind=kind,
        first=given.integer("first", newest),
        last=given.integer("last", newest),
        equal={name: given.text(name) for name in EQUALS if given.has(name)},
        least={name: given.number(f"min_{name}", 0.0) for name in RANGES if given.has(f"min_{name}")},
        most={name: given.number(f"max_{name}", 0.0) for name in RANGES if given.has(f"max_{name}")},
        sort=given.text("sort", ""),
    )
    text = given.text("text", "").casefold()
    conditions = [Condition.parse(each, "where", "reward=0 or rewards.format>0") for each in given.texts("where")]
    offset, limit = given.integer("offset", 0), given.integer("limit", 100, least=1, most=MAX_ROWS)
    deadline = time.monotonic() + BUDGET_S
    wanted = [step for step in entry.steps(kind) if question.first <= step <= question.last]
    pending = entry.index.extend(kind, reversed(wanted), deadline)
    if text or conditions:
        rows, following = _matching(entry, question, text, conditions, (offset, limit, deadline))
        count = None
    else:
        rows = entry.index.page(question, offset, limit)
        count = entry.index.count(question)
        following = offset + len(rows) if offset + len(rows) < count else None
        for row, record in zip(rows, _records(entry, rows), strict=True):
            row |= _previews(record) if record is not None else {"prompt": "", "response": ""}
    return {
        "rows": rows,
        "next": following,
        "count": count,
        "pending": pending,
        "steps": len(wanted),
        "choices": entry.index.choices(kind, question.first, question.last),
    }


def _matching(
    entry: CatalogEntry, question: RolloutQuery, text: str, conditions: list[Condition], page: tuple[int, int, float]
) -> tuple[list[dict[str, Any]], int | None]:
    """Return rollouts from an offset whose records match, and the offset of the next search.

    Args:
        entry: Entry of the rollouts.
        question: Filters of the index.
        text: Text to search for in lower case; empty for every record.
        conditions: Conditions that must all hold.
        page: First rollout to look at, maximum number of results, and the deadline.
    """
    offset, limit, deadline = page
    found: list[dict[str, Any]] = []
    end = offset + MAX_SCANNED
    while offset < end:
        rows = entry.index.page(question, offset, 2 * MAX_ROWS)
        if not rows:
            return found, None
        for row, record in zip(rows, _records(entry, rows), strict=True):
            offset += 1
            if record is None or not all(each.holds(_NearValues(record)) for each in conditions):
                continue
            if not text or any(text in each.casefold() for each in _texts(record)):
                found.append({**row, **_previews(record)})
                if len(found) == limit:
                    return found, offset
        if time.monotonic() > deadline:
            break
    return found, offset


class _NearValues(RecordValues):
    """Values by key, for which the last name of a path suffices: `format` for `rewards.format`."""

    def __getitem__(self, key: str) -> Any:
        paths = (key, *(f"{section}.{key}" for section in ("rewards", "row", "info")))
        return next(
            (value for path in paths if (value := super(_NearValues, self).__getitem__(path)) is not None), None
        )


def _texts(record: dict[str, Any]) -> list[str]:
    found = [text_of_content(message.get("content")) for message in record["prompt"]]
    for segment in segments_of(record):
        found += [text_of_content(message.get("content")) for message in segment["messages"]]
    for turn in turns_of(record):
        observed = turn.get("observation")
        if observed is not None and not isinstance(observed, str):
            observed = json.dumps(observed, ensure_ascii=False)
        found += [text_of_content(turn.get("text")), observed or ""]
    return [*found, str(record.get("failure") or "")]


def _records(entry: CatalogEntry, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    lines = [RolloutLine(row["kind"], row["step"], row["row"], row["offset"], row["length"]) for row in rows]
    return [_record(line) for line in entry.index.read(lines)]


def _previews(record: dict[str, Any]) -> dict[str, str]:
    """Return the beginnings of the last message of the prompt and of the response, each on one line."""
    last = record["prompt"][-1] if record["prompt"] else {}
    texts = {"prompt": text_of_content(last.get("content")), "response": response_of(record)}
    return {name: " ".join(text[: 4 * _PREVIEW].split())[:_PREVIEW] for name, text in texts.items()}


def rollout(catalog: PageCatalog, given: Parameters) -> dict[str, Any]:
    """Answer with one rollout, its group and the other steps that have rollouts of its prompt.

    Strings are cut at `MAX_CHARACTERS`.
    """
    entry, line, record = rollout_of(catalog, given)
    if record is None:
        raise RunDirectoryError(f"line {line.row + 1} of step {line.step} is not a rollout; see the raw record")
    prompt_id = str(record.get("prompt_id") or "")
    group = RolloutQuery(line.kind, line.step, line.step, {"prompt_id": prompt_id}, sort="position")
    others = entry.index.same_prompt(line.kind, prompt_id, MAX_ROWS) if prompt_id else []
    return {
        "kind": line.kind,
        "step": line.step,
        "row": line.row,
        "bytes": line.length,
        "record": mapped(record, lambda _, value: _cut(value) if isinstance(value, str) else value),
        "group": entry.index.page(group, 0, MAX_ROWS),
        "same_prompt": [{"step": step, "count": count, "reward": reward} for step, count, reward in others],
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n... ({len(text) - MAX_CHARACTERS:,} more characters: see the raw record)"


def raw_rollout(catalog: PageCatalog, given: Parameters) -> bytes:
    """Return the line of one rollout as it is in the file."""
    entry, line = _line(catalog, given)
    return entry.index.read([line])[0]


def rollout_of(catalog: PageCatalog, given: Parameters) -> tuple[CatalogEntry, RolloutLine, dict[str, Any] | None]:
    """Return the entry, the line and the record of the rollout that a request is about; None if it is not a rollout."""
    entry, line = _line(catalog, given)
    return entry, line, _record(entry.index.read([line])[0])


def _line(catalog: PageCatalog, given: Parameters) -> tuple[CatalogEntry, RolloutLine]:
    entry = catalog[given.text("id")]
    kind, step, row = given.text("kind"), given.integer("step", 0), given.integer("row", 0)
    line = entry.index.line(kind, step, row)
    if line is None:
        raise RunDirectoryError(f"{entry.id} has no rollout {row} of {kind} {step}")
    return entry, line


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the rollout in a line, or None if it is not one. Entries of another type than a run writes are replaced,
    so that a foreign file can be read."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    prompt, turns, rewards = record.get("prompt"), record.get("turns"), record.get("rewards")
    segments = segments_of(record)
    messages = prompt if isinstance(prompt, list) else [] if prompt is None else [prompt]
    rewards = rewards.items() if isinstance(rewards, dict) else ()
    return {
        **record,
        "prompt": [each if isinstance(each, dict) else {"role": "user", "content": str(each)} for each in messages],
        "turns": [each for each in turns if isinstance(each, dict)] if isinstance(turns, list) else [],
        "rewards": {str(name): value for name, value in rewards if type(value) in (int, float)},
        **({"segments": segments} if segments else {}),
    }
