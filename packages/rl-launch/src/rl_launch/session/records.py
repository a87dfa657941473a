"""Metrics and rollouts as JSON lines."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from rl_core.batch import Batch, RemoteColumn, RemoteRows
from rl_core.errors import RLError, WorkerDied
from rl_core.rollout import RECORD, RolloutGroup
from rl_core.rollout_record import append_records

_log = logging.getLogger(__name__)

MOST_STEPS = 2
"""Steps whose rollouts may wait to be written, as they are held in memory; the next step waits for them."""

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


class MetricsFile:
    """`metrics.jsonl`: one object per step, in the order of the steps.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's line; a number that is not finite becomes null."""
        line = json.dumps({"step": step, **{name: _number(value) for name, value in metrics.items()}}, allow_nan=False)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The lines; one that was cut short ends them."""
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def cut_back(self, step: int) -> None:
        """Drop the lines of later steps, which will be made again."""
        kept = [row for row in self.read() if row["step"] <= step]
        aside = self._path.with_name(f"{self._path.name}.part")
        with aside.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)


RolloutWriter = Callable[[str, RemoteRows, Sequence[float | None]], None]
"""Writes a new file of the records in some rows, each with its advantage, in another process."""


class RolloutFiles:
    """`rollouts/step_<n>.jsonl`: one object per rollout, written beside the steps.

    A thread has them written by the process that holds the texts, by `write_elsewhere`, or fetches and writes them
    itself. Its failure is raised by the next call. `flush` comes before anything that relies on the files: a
    checkpoint, and the end of the workers that hold the texts.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        self.write_elsewhere: RolloutWriter | None = None

    def append(self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> None:
        """Have rollouts written, flattened; those beyond the advantages, which trained nothing, have null.

        Waits while `MOST_STEPS` earlier ones are not written.
        """
        num_rollouts = sum(len(group.rollouts) for group in groups)
        if len(advantages) > num_rollouts:
            raise ValueError(f"{len(advantages)} advantages for {num_rollouts} rollouts")
        while len(self._writing) >= MOST_STEPS or (self._writing and self._writing[0].done()):
            self._writing.popleft().result()
        # the other columns need not stay until the thread is here
        records = [(group.prompt.id, group.records) for group in groups]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        padded = [*np.asarray(advantages).tolist(), *[None] * (num_rollouts - len(advantages))]
        self._writing.append(self._threads.submit(self._write, step, records, padded))

    def flush(self) -> None:
        """Wait until everything is written."""
        while self._writing:
            self._writing.popleft().result()

    def close(self) -> None:
        """End the thread; files that it has not begun are not written."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def cut_back(self, step: int) -> None:
        """Drop the files of later steps, and those that were not finished."""
        for path in self._folder.glob(".step_*.part"):
            path.unlink()
        for path in self._folder.glob("step_*.jsonl"):
            match = _STEP_FILE.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink()

    def _write(self, step: int, groups: Sequence[tuple[str, Batch]], advantages: Sequence[float | None]) -> None:
        path = self._folder / f"step_{step}.jsonl"
        if not path.exists() and self._is_written_elsewhere(path, [columns for _, columns in groups], advantages):
            return
        waiting = iter(advantages)
        with path.open("ab") as file:
            for prompt_id, columns in groups:
                own = list(islice(waiting, len(columns)))
                try:
                    records = columns.ragged(RECORD)
                except WorkerDied as error:
                    _log.warning("step %d: the texts of prompt %s are lost: %s", step, prompt_id, error)
                    continue
                append_records(file, zip(records, own, strict=True))

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
            _log.warning("%s: writing it here, as a rollout worker did not: %s", path.name, error)
            aside.unlink(missing_ok=True)
            return False
        aside.rename(path)
        return True


def _number(value: Any) -> float | int | None:
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain
