"""Metrics and rollouts of a run as JSON lines, and values of their tokens as Parquet files."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from rl_core.data.batch import Batch, RemoteColumn, RemoteRows
from rl_core.errors import RLError, WorkerDied, named
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, RECORD, WEIGHT_VERSIONS, RolloutGroup
from rl_core.rollouts.record import append_records
from rl_launch.run_session.checkpoints.manifest import replaced, sync_path
from rl_launch.run_session.config import TokenLevel
from rl_launch.run_session.rollouts import rollout_store
from rl_launch.run_session.rollouts.token_table import BATCH_COLUMNS, TextsOfTokens, TokenRows, TokenTables

_log = logging.getLogger(__name__)

MAX_STEPS = 2
"""Steps whose rollouts or tokens may wait to be written, as they are held in memory; the next step waits for them."""

TOKENS_PER_GROUP = 2**16
"""Maximum number of tokens of a step that are recorded, for each sampled group. The first rollout always is."""


class TokenFiles:
    """`rollouts/tokens_<n>.parquet`: a row per token of a step, written in parallel with the steps.

    A thread brings the columns of the recorded rollouts here and writes them. Its failures, such as a full disk, are
    reported and never raised: a step without its file of tokens is complete.

    Args:
        folder: The folder of the files.
        level: Rollouts that are recorded.
        num_groups: Number of groups of a step, if they are sampled.
    """

    def __init__(self, folder: Path, level: TokenLevel, num_groups: int) -> None:
        self._folder = folder
        self._level = level
        self._num_groups = num_groups
        self._tables = TokenTables(None)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="token-files")
        self._writing: deque[Future[None]] = deque()
        self._failed: list[int] = []

    def read_texts_from(self, texts: TextsOfTokens) -> None:
        """Record the texts of tokens, too."""
        self._tables = TokenTables(texts)

    def append(self, step: int, groups: Sequence[RolloutGroup], batch: Batch) -> None:
        """Write the tokens of a step. Waits while `MAX_STEPS` earlier steps are not written.

        Args:
            step: Number of the step.
            groups: Groups of the step; those that were not trained on come last.
            batch: Rows of the groups that were trained on, in the same order.
        """
        if self._level == "none":
            return
        parts = recorded_rows(step, groups, batch, self._num_groups if self._level == "sampled" else None)
        while len(self._writing) >= MAX_STEPS or (self._writing and self._writing[0].done()):
            self._writing.popleft().result()
        self._writing.append(self._threads.submit(self._write, step, parts))

    def flush(self) -> None:
        """Wait until everything is written, and is on the disk."""
        was_writing = bool(self._writing)
        while self._writing:
            self._writing.popleft().result()
        if was_writing:
            with suppress(OSError):
                sync_path(self._folder)

    def close(self) -> None:
        """End the thread; files that it has not begun are not written."""
        self._threads.shutdown(cancel_futures=True)

    def _write(self, step: int, parts: Sequence[TokenRows]) -> None:
        path = rollout_store.file_of(self._folder, step, "tokens")
        aside = path.with_name(f".{path.name}.part")
        try:
            with replaced(path, aside=aside) as file:
                self._tables.write(file, step, parts)
        except Exception as error:  # noqa: BLE001  # a record for people must not end the run
            if not self._failed:
                _log.warning(
                    "step %d: the values of its tokens were not recorded (%s: %s). The run continues without those of "
                    "steps that cannot be recorded; logger.token_level=none records none",
                    step,
                    type(error).__name__,
                    error,
                )
            self._failed.append(step)
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        else:
            if self._failed:
                _log.info(
                    "step %d: values of tokens are recorded again; those of %d steps are missing",
                    step,
                    len(self._failed),
                )
                self._failed.clear()


def recorded_rows(step: int, groups: Sequence[RolloutGroup], batch: Batch, num_groups: int | None) -> list[TokenRows]:
    """Choose the rollouts of a step whose tokens are recorded, without reading any.

    Args:
        step: Number of the step, which decides which groups are drawn.
        groups: Groups of the step; those that were not trained on come last.
        batch: Rows of the groups that were trained on.
        num_groups: Number of groups to draw from those that were trained on; None to record all groups.

    Raises:
        ValueError: If the batch has not the rows of the first groups.
    """
    ends = np.cumsum([len(group.columns) for group in groups])
    num_trained = int(np.searchsorted(ends, len(batch))) + 1 if len(batch) else 0
    if num_trained > len(groups) or (num_trained and ends[num_trained - 1] != len(batch)):
        raise ValueError(
            f"a batch of {len(batch)} rows does not belong to these groups, whose rows add up to {ends.tolist()}; pass "
            "the batch of `build_batch` to record_rollouts"
        )
    chosen = np.arange(num_trained)
    if num_groups is not None:
        drawn = np.random.default_rng(step).choice(num_trained, min(num_groups, num_trained), replace=False)
        chosen = np.sort(drawn)
    lines = np.append(0, np.cumsum([len(group.rollouts) for group in groups]))
    parts = []
    if len(chosen):
        starts = np.append(0, ends)
        columns = batch.only([name for name in BATCH_COLUMNS if name in batch])
        rows = np.concatenate([np.arange(starts[number], ends[number]) for number in chosen])
        parts.append(
            _rows_of(
                [groups[number] for number in chosen.tolist()],
                lines[chosen],
                columns if len(rows) == len(batch) else columns.select(rows),
            )
        )
    if num_groups is not None:
        # These are the first rollouts whose tokens do not exceed the limit together; at least one.
        return [next(part.chunks(num_groups * TOKENS_PER_GROUP)) for part in parts]
    aside = groups[num_trained:]
    if aside:
        names = [name for name in _OF_GROUPS if all(name in group.columns for group in aside)]
        columns = Batch.concat([group.columns.only(names) for group in aside])
        columns = columns.with_zeros(LOSS_MASK, np.ones(len(columns), dtype=bool))
        parts.append(_rows_of(aside, lines[num_trained:-1], columns))
    return parts


_OF_GROUPS = ("tokens", LOSS_MASK, GENERATION_LOGPROBS, WEIGHT_VERSIONS)


def _rows_of(groups: Sequence[RolloutGroup], lines: np.ndarray, columns: Batch) -> TokenRows:
    """Return the rows of whole groups.

    Args:
        groups: The groups.
        lines: Number of the first rollout of each in the step.
        columns: Columns of their rows.
    """
    counts = [np.array([len(own) for own in group.rollouts.row_lengths]) for group in groups]
    index = [np.repeat(np.arange(len(own)), own) for own in counts]
    segment = [np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own) for own in counts]
    return TokenRows(
        np.concatenate([own + line for own, line in zip(index, lines, strict=True)]),
        [group.prompt.id for group, own in zip(groups, index, strict=True) for _ in own],
        np.concatenate(index),
        np.concatenate(segment),
        columns,
    )


class MetricsFile:
    """`metrics.jsonl`: one object per step, in the order of the steps.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's line; a number that is not finite becomes null."""
        line = json.dumps({"step": step, **{name: _number(value) for name, value in metrics.items()}}, allow_nan=False)
        with named(self._path), self._path.open("a") as file:
            file.write(line + "\n")

    def sync(self) -> None:
        """Write all lines to the disk; call it before anything that relies on them."""
        if self._path.exists():
            with named(self._path), self._path.open("rb") as file:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return the lines, without those that were cut short."""
        try:
            with named(self._path):
                lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [row for row in map(metrics_row, lines) if row is not None]

    def cut_back(self, step: int) -> None:
        """Drop the lines of later steps, which will be made again."""
        kept = [row for row in self.read() if row["step"] <= step]
        with replaced(self._path) as file:
            file.writelines(f"{json.dumps(row)}\n".encode() for row in kept)
        sync_path(self._path.parent)


RolloutWriter = Callable[[str, RemoteRows, Sequence[float | None]], None]
"""Writes a new file of the records in some rows, each with its advantage, in another process."""


class RolloutFiles:
    """`rollouts/step_<n>.jsonl` and `val_<n>.jsonl`: one object per rollout, written in parallel with the steps. See
    `rollout_store` for the files of earlier steps.

    A thread has them written by the process that holds the texts, by `write_elsewhere`, or fetches and writes them
    itself. Its failure is raised by the next call. `flush` comes before anything that relies on the files: a
    checkpoint, and the end of the workers that hold the texts.

    Args:
        folder: The folder of the files.
        tokens: Files of the tokens of rollouts, which are written, flushed and dropped along with them; None for none.
    """

    def __init__(self, folder: Path, tokens: TokenFiles | None = None) -> None:
        self._folder = folder
        self._tokens = tokens
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        self._writing: deque[Future[None]] = deque()
        self._archiver = ThreadPoolExecutor(1, thread_name_prefix="rollout-archives")
        self._archiving: Future[None] | None = None
        self.write_elsewhere: RolloutWriter | None = None

    def append(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: np.ndarray,
        kind: rollout_store.Kind = "step",
        *,
        batch: Batch | None = None,
    ) -> None:
        """Write rollouts, flattened, in each group the rollouts of opponents last. Rollouts without an advantage, which
        were not trained on, have null. Validation rollouts replace the rollouts of an earlier validation of the same
        step.

        Waits while `MAX_STEPS` earlier ones are not written. With the batch of the rollouts that were trained on,
        values of their tokens are written, too.
        """
        num_rollouts = sum(len(group.rollouts) for group in groups)
        if len(advantages) > num_rollouts:
            raise ValueError(f"{len(advantages)} advantages for {num_rollouts} rollouts")
        while len(self._writing) >= MAX_STEPS or (self._writing and self._writing[0].done()):
            self._writing.popleft().result()
        # the other columns need not stay until the thread is here
        records = [(group.prompt.id, group.all_records) for group in groups]
        waiting = iter(np.asarray(advantages).tolist())
        padded: list[float | None] = []
        for group in groups:
            padded += [next(waiting, None) for _ in range(len(group.rollouts))]
            padded += [None] * (len(group.opponents.rollouts) if group.opponents is not None else 0)
        self._writing.append(self._threads.submit(self._write, step, records, padded, kind))
        if self._tokens is not None and batch is not None:
            self._tokens.append(step, groups, batch)
        if self._archiving is not None:
            if not self._archiving.done():
                return
            error, self._archiving = self._archiving.exception(), None
            if error is not None:
                _log.warning("rollouts of earlier steps were not archived: %s", error)
        if step % rollout_store.STEPS_PER_ARCHIVE == 0:
            self._archiving = self._archiver.submit(rollout_store.archive_before, self._folder, step)

    def flush(self) -> None:
        """Wait until everything is written, and is on the disk."""
        if self._tokens is not None:
            self._tokens.flush()
        was_writing = bool(self._writing)
        while self._writing:
            self._writing.popleft().result()
        if was_writing:
            sync_path(self._folder)

    def close(self) -> None:
        """End the threads; files that they have not begun are not written, an archive under way is completed."""
        if self._tokens is not None:
            self._tokens.close()
        self._threads.shutdown(cancel_futures=True)
        self._archiver.shutdown(cancel_futures=True)

    def _write(
        self,
        step: int,
        groups: Sequence[tuple[str, Batch]],
        advantages: Sequence[float | None],
        kind: rollout_store.Kind,
    ) -> None:
        path = rollout_store.file_of(self._folder, step, kind)
        if kind == "val":
            path.unlink(missing_ok=True)
        if not path.exists() and self._is_written_elsewhere(path, [columns for _, columns in groups], advantages):
            return
        waiting = iter(advantages)
        with named(path), path.open("ab") as file:
            for prompt_id, columns in groups:
                own = list(islice(waiting, len(columns)))
                try:
                    records = columns.ragged(RECORD)
                except WorkerDied as error:
                    _log.warning("step %d: the messages of prompt %s are lost: %s", step, prompt_id, error)
                    continue
                append_records(file, zip(records, own, strict=True))
            file.flush()
            os.fsync(file.fileno())

    def _is_written_elsewhere(self, path: Path, groups: Sequence[Batch], advantages: Sequence[float | None]) -> bool:
        columns = [group.columns[RECORD] for group in groups]
        remote = [column.rows for column in columns if isinstance(column, RemoteColumn)]
        if self.write_elsewhere is None or not remote or len(remote) < len(columns):
            return False
        # a writer that is given up may go on writing for a while, to a file that nobody reads
        aside = path.with_name(f".{path.stem}.{uuid4().hex[:8]}.part")
        try:
            self.write_elsewhere(str(aside.absolute()), RemoteRows.concat(remote), advantages)
        except RLError as error:
            _log.warning("%s: written by the driver, because a rollout worker failed: %s", path.name, error)
            aside.unlink(missing_ok=True)
            return False
        aside.rename(path)
        return True


def _number(value: Any) -> float | int | None:
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain


def metrics_row(line: str) -> dict[str, Any] | None:
    """Return the object in a line of metrics, or the last one if an earlier line was cut short before it;
    None if it was cut short itself. Metrics are flat, so the last brace opens the last object.
    """
    try:
        row = json.loads(line[max(0, line.rfind("{")) :])
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and "step" in row else None
