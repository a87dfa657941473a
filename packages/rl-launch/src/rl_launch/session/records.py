"""Metrics and rollouts as JSON lines."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.batch import Batch
from rl_core.errors import WorkerDied
from rl_core.rollout import RECORD, RolloutGroup

_log = logging.getLogger(__name__)

MOST_STEPS = 2
"""Steps whose rollouts wait to be written, after which the next waits for them: what they hold lies in memory."""

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


class MetricsFile:
    """`metrics.jsonl`: one object per step, in the order of the steps.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's line; a number that is not finite becomes null, which JSON has."""
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
        """Drop what was written of later steps: they will come again."""
        kept = [row for row in self.read() if row["step"] <= step]
        aside = self._path.with_name(f"{self._path.name}.part")
        with aside.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)


class RolloutFiles:
    """`rollouts/step_<n>.jsonl`: one object per rollout, fetched and written by a thread beside the steps.

    What the thread fails with is raised by the next call. `flush` comes before anything that rests on the files: a
    checkpoint, and the end of the workers that hold the texts.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()

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
        records = [(group.prompt.id, group.columns.only([RECORD])) for group in groups]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        self._writing.append(self._threads.submit(self._write, step, records, np.asarray(advantages).tolist()))

    def flush(self) -> None:
        """Wait until everything is written."""
        while self._writing:
            self._writing.popleft().result()

    def close(self) -> None:
        """End the thread; what it has not begun is not written."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def cut_back(self, step: int) -> None:
        """Drop the files of later steps."""
        for path in self._folder.glob("step_*.jsonl"):
            match = _STEP_FILE.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink()

    def _write(self, step: int, groups: Sequence[tuple[str, Batch]], advantages: Sequence[float]) -> None:
        waiting = iter(advantages)
        with (self._folder / f"step_{step}.jsonl").open("ab") as file:
            for prompt_id, columns in groups:
                own = list(islice(waiting, len(columns)))
                try:
                    records = columns.ragged(RECORD)
                except WorkerDied as error:
                    _log.warning("step %d: the texts of prompt %s are lost: %s", step, prompt_id, error)
                    continue
                for record, advantage in zip_longest(records, own):
                    # an object on one line, to which one entry is added
                    file.write(record[:-1].data)
                    file.write(f', "advantage": {json.dumps(_number(advantage))}}}\n'.encode())


def _number(value: Any) -> float | int | None:
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain
