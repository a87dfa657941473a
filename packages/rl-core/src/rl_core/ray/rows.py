"""Rows in Ray's object store, which holds a batch's remote columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray

from rl_core.data.batch import Batch, RemoteRows
from rl_core.errors import FailureOrigin
from rl_core.ray.calls import fetch
from rl_core.rollouts.group import GroupReport, RolloutGroup
from rl_core.rollouts.rollout import Prompt

FETCH_TIMEOUT_S = 300.0
"""Longest time to bring rows here; a loss with a node is known after seconds."""


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Columns that a call returned and this process has not read.

    The caller owns what a call returns, so it outlives the worker that made it, though not its node.

    Args:
        ref: Reference of the `Batch`.
        origin: The worker that made it, for messages.
    """

    ref: ray.ObjectRef
    origin: FailureOrigin

    def fetch(self) -> Batch:
        """Bring the columns here.

        Raises:
            WorkerDied: If they were lost with a node.
        """
        found: Batch = fetch(self.ref, self.origin, FETCH_TIMEOUT_S)
        return found


def refs_of(rows: RemoteRows) -> list[ray.ObjectRef]:
    """Return references to the stores of rows, which are all in Ray's object store."""
    stores = [store for store in rows.stores if isinstance(store, StoredRows)]
    assert len(stores) == len(rows.stores), f"not all rows lie in Ray's object store: {rows.stores}"
    return [store.ref for store in stores]


def stored_groups(
    prompts: Sequence[Prompt],
    reports: Sequence[GroupReport],
    columns: ray.ObjectRef,
    records: ray.ObjectRef,
    origin: FailureOrigin,
) -> list[RolloutGroup]:
    """Return groups whose columns stay in Ray's object store; only the reports are here.

    Args:
        prompts: Prompt of each group.
        reports: Report of each group; all have the same columns.
        columns: Reference to the columns of the rollouts of all groups, one group after the other.
        records: Reference to the records of these rollouts, in the same order.
        origin: The worker that made them, for messages.
    """
    by_group = [[length for own in report.rollouts.row_lengths for length in own] for report in reports]
    lengths = np.array([length for own in by_group for length in own], dtype=np.int64)
    rows, text = (RemoteRows.of(StoredRows(ref, origin), lengths) for ref in (columns, records))
    groups, start = [], 0
    for prompt, report, own_lengths in zip(prompts, reports, by_group, strict=True):
        end = start + len(own_lengths)
        held = {**rows.between(start, end).columns(report.columns), **text.between(start, end).columns(report.records)}
        groups.append(RolloutGroup.split(prompt, report.rollouts, Batch(held)))
        start = end
    return groups
