"""Generation of rows, in its own process; imports reasoning-gym."""

from __future__ import annotations

import difflib
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS, create_dataset

from rl_core.config import did_you_mean
from rl_core.errors import ConfigError, DataError
from rl_envs.reasoning_gym.plugin import MAX_SEED, AnswerFormat, ReasoningGymSettings

INSTRUCTIONS: Mapping[AnswerFormat, str] = {
    "tag": "Think step by step, then give the final answer between <answer> and </answer>, and nothing else there.",
    "boxed": r"Think step by step, then give the final answer in \boxed{}, and nothing else there.",
    "plain": "Give the final answer and nothing else.",
}

MAX_DRAWS_PER_ROW = 20
"""Maximum draws per expected row; beyond it the task counts as having too few questions."""

CHUNK = 100
"""Entries made at a time; fixed, as the entries of some tasks depend on it."""


def main() -> None:
    """Read a pickled (settings, split) from standard input; write the pickled rows, or error, to standard output."""
    settings, split = pickle.loads(sys.stdin.buffer.read())
    # What tasks print must not end up among the rows.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        try:
            outcome: Any = rows(settings, split)
        except (ConfigError, DataError) as error:
            outcome = error
        out.write(pickle.dumps(outcome))


def rows(settings: ReasoningGymSettings, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split; validation holds no question twice.

    Raises:
        ConfigError, DataError: as `dataset.load`.
    """
    _check(settings)
    share = settings.validation_fraction if split == "validation" else 1 - settings.validation_fraction
    max_draws = int(MAX_DRAWS_PER_ROW * (settings.size / share + 100))
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    num_draws = 0
    for entry in _entries(settings, split, max_draws):
        num_draws += 1
        question = str(entry["question"])
        repeats = split == "validation" and question in seen
        if is_for_validation(question, settings.validation_fraction) == (split == "validation") and not repeats:
            seen.add(question)
            content = f"{str(entry['question']).rstrip()}\n\n{INSTRUCTIONS[settings.answer_format]}"
            info = {
                "task": settings.task,
                "task_config": repr(_literal(settings.config)),
                "entry": repr(_literal(entry)),
                "answer_format": settings.answer_format,
            }
            messages = [{"role": "user", "content": content}]
            answer = None if entry["answer"] is None else str(entry["answer"])
            found.append({"messages": messages, "answer": answer, "info": info, "environment": "reasoning_gym"})
            if len(found) == settings.size:
                return found
    raise DataError(
        f"reasoning_gym task {settings.task!r} has too few questions with config {settings.config}: {num_draws} draws "
        f"gave {len(seen)} different ones for {split}, which needs {settings.size} rows; set a smaller size, "
        f"another validation_fraction (got {settings.validation_fraction}), or a config with more variety"
    )


def is_for_validation(question: str, fraction: float) -> bool:
    """Return whether a question belongs to validation, only by a digest of its text."""
    digest = blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _entries(settings: ReasoningGymSettings, split: str, max_draws: int) -> Iterator[Mapping[str, Any]]:
    """Yield entries of the task, from the first seed of the split upwards (entry i of seed s is made from s + i)."""
    start = settings.seed + (2**31 if split == "validation" else 0)
    for drawn in range(0, min(max_draws, MAX_SEED), CHUNK):
        dataset = create_dataset(settings.task, **settings.config, seed=start + drawn, size=CHUNK)
        yield from (dataset[index] for index in range(CHUNK))


def _check(settings: ReasoningGymSettings) -> None:
    if settings.task not in DATASETS:
        near = difflib.get_close_matches(settings.task, DATASETS, n=5, cutoff=0.3)
        hint = did_you_mean(settings.task, DATASETS) or f"; the nearest are {', '.join(near)}." if near else "."
        raise ConfigError(
            f"no reasoning_gym task {settings.task!r}{hint} rl data list reasoning_gym lists all {len(DATASETS)}"
        )
    _, config_type = DATASETS[settings.task]
    known = {field.name for field in fields(config_type)} - {"seed", "size"}
    for key in settings.config:
        if key in ("seed", "size"):
            raise ConfigError(
                f"reasoning_gym: `{key}` is a setting of the dataset, not of the task's config; move it up"
            )
        if key not in known:
            raise ConfigError(
                f"reasoning_gym task {settings.task!r} has no setting {key!r}{did_you_mean(key, known)}; "
                f"it has {', '.join(sorted(known))}"
            )
    try:
        create_dataset(settings.task, **settings.config, seed=settings.seed, size=1)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning_gym task {settings.task!r} refuses its config {settings.config}: {error}"
        ) from None


def _literal(value: Any) -> Any:
    """Return the value in Python's literals, so that tuples stay tuples through whatever carries the text."""
    match value:
        case np.generic():
            return value.item()
        case np.ndarray():
            return value.tolist()
        case Mapping():
            return {_literal(key): _literal(item) for key, item in value.items()}
        case list():
            return [_literal(item) for item in value]
        case tuple():
            return tuple(_literal(item) for item in value)
        case set() | frozenset():
            return {_literal(item) for item in value}
        case bool() | None:
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case _:
            return str(value)
