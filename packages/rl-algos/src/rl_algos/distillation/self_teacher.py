"""The student as its own teacher: with more in its prompt, the same weights know better what to say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rl_algos.distillation.config import SelfTeacherConfig, fields_of
from rl_algos.distillation.teachers import COLUMNS
from rl_algos.losses.distillation import TEACHER_NUMBER
from rl_algos.rollouts.data import Encode
from rl_algos.rollouts.training.segments import to_rows
from rl_core.data.batch import TOKENS, Batch, Column
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError
from rl_core.images import IMAGES
from rl_core.model import Model, Read
from rl_core.rollouts.group import LOSS_MASK, RECORD, RolloutGroup
from rl_core.rollouts.record import turns_of
from rl_core.rollouts.rollout import Prompt
from rl_core.rollouts.thoughts import final_text

PROMPT, SUCCESS, FEEDBACK = "prompt", "success", "feedback"
"""Fields of a template that are no fields of the row: the last message of the prompt, the final text of a right rollout
of the same group, and `info["feedback"]` of the environment."""


class SelfTeacher:
    """A student that teaches itself.

    Args:
        model: The student.
        encode: Renders a conversation by the student's chat template.
        settings: Templates of the teacher's prompt, and the weights that read it.
        reads: The results that the loss takes.
        temperature: Divides the logits.
        max_tokens: Maximum number of tokens of a row; rollouts that exceed it with the teacher's prompt do not train.
    """

    def __init__(
        self,
        model: Model,
        encode: Encode,
        settings: SelfTeacherConfig,
        reads: Sequence[Read],
        *,
        temperature: float,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._encode = encode
        self._settings = settings
        self._reads = list(reads)
        self._temperature = temperature
        self._max_tokens = max_tokens
        self.metrics: dict[str, float] = {}

    def scored(self, batch: Batch, groups: Sequence[RolloutGroup]) -> Batch:
        """Return the rollouts with what the teacher would have said at each of their tokens, in the columns of the
        loss. The loss mask is empty at rollouts for which the teacher knows nothing more than the student. The columns
        are aligned here, on the driver, so that they travel through it.

        Args:
            batch: Batch of the groups, with a row per rollout.
            groups: Groups of the rollouts, in the order of the rows.

        Raises:
            DataError: If a row has no field that a template names, or a rollout does not begin with its row's prompt.
        """
        tokens = batch.ragged(TOKENS)
        own = [group.prompt.token_ids for group in groups for _ in group.rollouts]
        rows, starts, is_taught = [], [], []
        for row, student, teacher in zip(tokens, own, self._prompts(groups), strict=True):
            if not np.array_equal(row[: len(student)], student):
                raise DataError(
                    "self_teacher: a rollout does not begin with the prompt of its row, so the teacher's prompt cannot "
                    "replace it, as in plays of several agents. Use another model as the teacher"
                )
            fits = teacher is not None and len(teacher) + len(row) - len(student) <= self._max_tokens
            prompt = teacher if teacher is not None and fits else student
            rows.append(np.concatenate([prompt, row[len(student) :]]))
            starts.append(len(prompt))
            is_taught.append(fits)
        read: dict[str, Column] = {TOKENS: Ragged.from_rows(rows, np.int32)}
        if IMAGES in batch:
            read[IMAGES] = batch[IMAGES]
        found = self._model.infer(
            Batch(read), self._reads, reference=self._settings.weights == "reference", temperature=self._temperature
        )
        # A token of a response is at another place in the teacher's row; tokens of prompts train nothing.
        within = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        student_starts = np.repeat([len(prompt) for prompt in own], tokens.lengths)
        ahead = np.repeat(np.array(starts) + read_offsets(rows), tokens.lengths)
        places = np.where(within < student_starts, 0, ahead + within - student_starts)
        columns: dict[str, Column] = {
            COLUMNS[name]: tokens.like(found.ragged(name).values[places]) for name in found.columns
        }
        columns[TEACHER_NUMBER] = tokens.like(np.zeros(len(tokens.values), np.int32))
        self.metrics = {"teacher/taught": float(np.mean(is_taught)) if is_taught else 0.0}
        return batch.with_columns(columns).with_zeros(LOSS_MASK, to_rows(batch, ~np.array(is_taught, dtype=bool)))

    def _prompts(self, groups: Sequence[RolloutGroup]) -> Iterator[np.ndarray | None]:
        """Yield int32 `[tokens]`, the teacher's prompt for each rollout; None if no template has all its fields."""
        wanted = {name for template in self._settings.prompts for name in fields_of(template)}
        for group in groups:
            records = [json.loads(record.tobytes()) for record in group.records.ragged(RECORD)]
            rewards = group.rewards()
            texts = [final_text(turns[-1]["text"]) if (turns := turns_of(record)) else "" for record in records]
            right = np.flatnonzero(rewards >= self._settings.success_threshold)
            for number, record in enumerate(records):
                known = {**group.prompt.info, PROMPT: _content(group.prompt)}
                others = [index for index in right if index != number] if SUCCESS in wanted else []
                if others:
                    known[SUCCESS] = texts[others[0]]
                if feedback := (record.get("info") or {}).get(FEEDBACK):
                    known[FEEDBACK] = feedback
                yield self._prompt(group.prompt, known)

    def _prompt(self, prompt: Prompt, known: Mapping[str, Any]) -> np.ndarray | None:
        for template in self._settings.prompts:
            missing = fields_of(template) - known.keys()
            if not missing:
                message = {**prompt.messages[-1], "content": template.format_map(known)}
                return self._encode([*prompt.messages[:-1], message], prompt.tools)
            if unknown := missing - {SUCCESS, FEEDBACK}:
                fields, names = ", ".join([PROMPT, SUCCESS, FEEDBACK, *prompt.info]), ", ".join(sorted(unknown))
                raise DataError(f"self_teacher.prompts: {prompt} has no field {names}; its fields are {fields}")
        return None


def read_offsets(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return int64 `[rows]`, the place of each row among all values."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return np.cumsum(lengths) - lengths


def _content(prompt: Prompt) -> str:
    content = prompt.messages[-1].get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
