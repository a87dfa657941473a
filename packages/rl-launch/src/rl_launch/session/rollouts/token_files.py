"""The files of tokens of a run: which rollouts are recorded, and the thread that writes them."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from rl_core.data.batch import Batch
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, WEIGHT_VERSIONS, RolloutGroup
from rl_launch.session.checkpoints.manifest import sync_path
from rl_launch.session.config import TokenLevel
from rl_launch.session.rollouts import rollout_store
from rl_launch.session.rollouts.token_table import BATCH_COLUMNS, TextsOfTokens, TokenRows, TokenTables

_log = logging.getLogger(__name__)

MAX_STEPS = 2
"""Steps whose tokens may wait to be written; the next step waits for them."""

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
        self._threads: ThreadPoolExecutor | None = None
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
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="token-files")
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
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._threads = None

    def _write(self, step: int, parts: Sequence[TokenRows]) -> None:
        path = rollout_store.file_of(self._folder, step, "tokens")
        aside = path.with_name(f".{path.name}.part")
        try:
            with aside.open("wb") as file:
                self._tables.write(file, step, parts)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
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
        return [_bounded(part, num_groups * TOKENS_PER_GROUP) for part in parts]
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


def _bounded(rows: TokenRows, most_tokens: int) -> TokenRows:
    """Return the first rollouts whose tokens do not exceed a limit together; at least one."""
    return next(rows.chunks(most_tokens))
