"""The teachers of a student, and their readings of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np

from rl_algos.data.examples import Dataset, Datasets
from rl_algos.distillation.config import teacher_sections
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
from rl_core.errors import ConfigError, DataError
from rl_core.model import Model, Read
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.tokenizer import Tokenizer

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
        The loss mask is empty at rows without a teacher; if no row has one, there are no columns of the loss.

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
        has_teacher = np.array([bool(role) for role in roles])
        if has_teacher.all():
            return self.scored_rows(batch, roles)
        columns: dict[str, Column] = {}
        if has_teacher.any():
            scored = self.scored_rows(batch.select(np.flatnonzero(has_teacher)), [role for role in roles if role])
            places, offsets = np.repeat(has_teacher, batch.lengths), np.concatenate([[0], np.cumsum(batch.lengths)])
            for name in set(scored) - set(batch):
                found = scored.ragged(name).values
                values = np.zeros((len(places), *found.shape[1:]), found.dtype)
                values[places] = found
                columns[name] = Ragged(values, offsets)
        return batch.with_columns(columns).with_zeros(LOSS_MASK, ~has_teacher)

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


def require_teacher(config: object, dataset: Dataset, *names: str) -> str:
    """Return the role of the teacher of a dataset's rows."""
    sections = teacher_sections(config)
    role = teacher_of(sections, *names, dataset.name)
    if not role:
        known = ", ".join(sections.values())
        meant = " or ".join(repr(name) for name in (*names, dataset.name))
        raise DataError(
            f"the dataset {dataset.name!r} has no teacher: there are {known}. Add one with the name {meant} to "
            "`teachers`, or add `teacher`, which serves all other rows"
        )
    return role


def check_routes(config: object, datasets: Datasets, *, all_rows: bool) -> None:
    """Refuse a teacher of an environment or a dataset that no row has, such as one whose name is misspelt.

    Args:
        config: Resolved config of the run.
        datasets: Datasets for training and validation.
        all_rows: True to refuse rows without a teacher too.

    Raises:
        DataError: With the names that there are.
    """
    sections, used, names = teacher_sections(config), {"teacher"}, set()
    for dataset in (*datasets.train, *datasets.validation):
        for environment in dataset.environments():
            names |= {environment, dataset.name}
            used.add(teacher_of(sections, environment, dataset.name))
            if all_rows:
                require_teacher(config, dataset, environment)
    for role, key in sections.items():
        if role not in used:
            known = ", ".join(sorted(names))
            raise DataError(f"{key}: no row has this environment or dataset; there are {known}. Rename or remove it")


def check_teachers(config: object, tokenizer: Tokenizer) -> None:
    """Refuse a teacher whose tokens differ from the student's. A teacher without tokenizer files is assumed to have the
    same tokens.

    Raises:
        ConfigError: With the first token that differs.
    """
    # A run is checked before a tokenizer is needed.
    from rl_algos.tokenizer import different_token

    student = attrgetter("policy.model_name")(config)
    for key in teacher_sections(config).values():
        name = attrgetter(key)(config).model_name
        if name != student and (differs := different_token(name, tokenizer, whose="the student's")):
            raise ConfigError(
                f"{key}.model_name: the tokenizer of {name!r} differs from the student's: {differs}. Choose a teacher "
                "with the same tokens, or compare spans of text with algorithm: distillation and "
                "distillation.cross_tokenizer=true"
            )
