"""Rows in Ray's object store: where a batch's remote columns lie."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from rl_core.batch import Batch, RemoteRows
from rl_core.errors import Origin
from rl_core.ray.calls import fetch
from rl_core.rollout import GroupReport, Prompt, RolloutGroup

FETCH_TIMEOUT_S = 300.0
"""Bound of bringing rows here; what is lost with a node is known to be after seconds."""


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Columns that a call returned and nobody here has read.

    The caller owns what a call returns, so it outlives the worker that made it, though not the node it lies on.

    Args:
        ref: of the `Batch`.
        origin: who made it, for messages.
    """

    ref: ray.ObjectRef
    origin: Origin

    def fetch(self) -> Batch:
        """Bring the columns here.

        Raises:
            WorkerDied: if they were lost with a node.
        """
        found: Batch = fetch(self.ref, self.origin, FETCH_TIMEOUT_S)
        return found


def stored_group(
    prompt: Prompt, report: GroupReport, columns: ray.ObjectRef, records: ray.ObjectRef, origin: Origin
) -> RolloutGroup:
    """A group of which only the report is here."""
    lengths = [rollout.num_tokens for rollout in report.rollouts]
    rows = RemoteRows.of(StoredRows(columns, origin), lengths).columns(report.columns)
    text = RemoteRows.of(StoredRows(records, origin), lengths).columns(report.records)
    return RolloutGroup(prompt, report.rollouts, Batch({**rows, **text}))
