"""Metrics and rollouts as JSON lines."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from rl_core.data.batch import Batch, RemoteColumn, RemoteRows
from rl_core.errors import RLError, WorkerDied, named
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.record import append_records
from rl_launch.session.checkpoints.manifest import sync_path
from rl_launch.session.rollouts import rollout_store
from rl_launch.session.rollouts.token_files import TokenFiles

_log = logging.getLogger(__name__)

MAX_STEPS = 2
"""Steps whose rollouts may wait to be written, as they are held in memory; the next step waits for them."""


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
        aside = self._path.with_name(f"{self._path.name}.part")
        with named(self._path), aside.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
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
        self._threads: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        self._archiver: ThreadPoolExecutor | None = None
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
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        padded = _by_record(groups, np.asarray(advantages).tolist())
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
            if self._archiver is None:
                self._archiver = ThreadPoolExecutor(1, thread_name_prefix="rollout-archives")
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
        for threads in (self._threads, self._archiver):
            if threads is not None:
                threads.shutdown(cancel_futures=True)
        self._threads = self._archiver = None

    def cut_back(self, step: int) -> None:
        """Drop the rollouts of later steps, and files that were not finished."""
        rollout_store.cut_back(self._folder, step)

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


def _by_record(groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> list[float | None]:
    """Return the advantage of each record of the groups; None without one."""
    waiting = iter(advantages)
    found: list[float | None] = []
    for group in groups:
        found += [next(waiting, None) for _ in range(len(group.rollouts))]
        if group.opponents is not None:
            found += [None] * len(group.opponents.rollouts)
    return found


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
