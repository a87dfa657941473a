"""The teachers of a student, and their readings of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from rl_algos.images.columns import seen_columns
from rl_algos.losses.distillation import (
    TEACHER_HIDDEN,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_NUMBER,
    TEACHER_TOKEN_LOGPROBS,
)
from rl_core.data.batch import Batch, Column
from rl_core.data.ragged import Ragged
from rl_core.model import Model, Read
from rl_core.rollouts.group import RolloutGroup

COLUMNS = {
    "topk_ids": TEACHER_IDS,
    "topk_logprobs": TEACHER_LOGPROBS,
    "hidden": TEACHER_HIDDEN,
    "logprobs": TEACHER_TOKEN_LOGPROBS,
}
"""Columns of a teacher's reads, to those that losses take."""


def teacher_of(roles: Collection[str], *names: str) -> str:
    """Return the role of the teacher for rows of these names (an environment, a dataset): the first that there is one
    for, or `teacher`; empty if there is none."""
    return next((role for role in (*(f"teacher_{name}" for name in names), "teacher") if role in roles), "")


class RolloutTeacher(Protocol):
    """A teacher of the student's own rollouts."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Measurements of the newest rows, by name."""

    def scored(self, batch: Batch, groups: Sequence[RolloutGroup]) -> Batch:
        """Return the rows with the columns of the loss."""


class Teachers:
    """The teachers of a run.

    Args:
        models: Models by role, in the order of the heads of the loss.
        reads: The results that the loss takes.
        temperature: Divides the logits.
    """

    def __init__(self, models: Mapping[str, Model], reads: Sequence[Read], *, temperature: float) -> None:
        self._models = dict(models)
        self._reads = list(reads)
        self._temperature = temperature

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def scored(self, batch: Batch, groups: Sequence[RolloutGroup]) -> Batch:
        """Return the rows with the columns of the loss; the teacher of each prompt's environment or dataset scores it.

        Args:
            batch: Batch of the groups from `rl_algos.rollouts.training.batch.build_batch`.
            groups: Groups of the rollouts, in the order of the rows.
        """
        roles = [
            teacher_of(self._models, group.prompt.environment, group.prompt.dataset)
            for group in groups
            for rows in group.rollouts.row_lengths
            for _ in rows
        ]
        return self.scored_rows(batch, roles)

    def scored_rows(self, batch: Batch, roles: Sequence[str]) -> Batch:
        """Return the rows with the readings of their teachers, in columns named as the loss takes them.

        Args:
            batch: Batch with the tokens of all rows.
            roles: Roles of each row's teacher.
        """
        names, tokens = np.asarray(roles), seen_columns(batch)
        rows, parts = [], []
        for role in dict.fromkeys(roles):
            own = np.flatnonzero(names == role)
            # if one teacher has all rows, they stay where they are
            its_tokens = tokens if len(own) == len(names) else tokens.select(own)
            rows.append(own)
            parts.append(self._models[role].infer(its_tokens, self._reads, temperature=self._temperature))
        found = parts[0] if len(parts) == 1 else Batch.concat(parts).select(np.argsort(np.concatenate(rows)))
        numbers = np.asarray([list(self._models).index(role) for role in roles], np.int32)
        offsets = np.concatenate([[0], np.cumsum(batch.lengths)])
        columns: dict[str, Column] = {COLUMNS[name]: column for name, column in found.columns.items()}
        return batch.with_columns({**columns, TEACHER_NUMBER: Ragged(np.repeat(numbers, batch.lengths), offsets)})
