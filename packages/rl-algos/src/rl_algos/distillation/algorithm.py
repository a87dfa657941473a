"""Distillation, from the resolved config to the objects of its loop, or of the loop for given rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.distillation import loop
from rl_algos.distillation.config import DistillationLossConfig, RolloutsRoot, TextRoot, teacher_sections
from rl_algos.distillation.data import DistillationData, TextData, TextRow, prepare, prepare_text, reader, text_reader
from rl_algos.distillation.prompts import load
from rl_algos.distillation.span_teacher import SpanTeacher, Translator
from rl_algos.distillation.teachers import RolloutScorer, Teachers
from rl_algos.distillation.validation import DistillationValidation
from rl_algos.distillation.vocabulary import sends_hidden
from rl_algos.losses.distillation import DistillationLoss, Divergence, WholeDistillationLoss
from rl_algos.losses.spans import SpanLoss
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.setup import steps_of, validation_sampling
from rl_algos.sft.data import to_batch as text_batch
from rl_algos.supervised.algorithm import SupervisedAlgorithm
from rl_algos.supervised.loop import Objective
from rl_algos.supervised.loop import train as learn
from rl_core.data.batch import Batch
from rl_core.model import HIDDEN, LOGPROBS, HeadFiles, Loss, Model, hidden_states, topk
from rl_core.model_config import ModelConfig
from rl_core.run import Components, Run

TEACHER = "teacher"
"""Column of the role of each row's teacher."""


class Distillation(RolloutAlgorithm[RolloutsRoot]):
    """Distillation on the student's own rollouts."""

    def load(self, config: RolloutsRoot) -> Datasets:
        return load(config)

    def prepare(self, config: RolloutsRoot, tokenizer: Any, loaded: Datasets) -> DistillationData:
        return prepare(config, tokenizer, loaded)

    def row_reader(self, config: RolloutsRoot) -> RowReader:
        return reader(config)

    def run(self, config: RolloutsRoot, components: Components, run: Run) -> None:
        data: DistillationData = components.data
        settings, policy = config.distillation, components.models["policy"]
        loss, teachers = _comparison(config, components)
        sampling = validation_sampling(config.policy.generation, data.stop_token_ids)
        validation = DistillationValidation(policy, teachers, loss, data.validation, sampling, settings)
        loop.train(
            settings,
            loss,
            policy=policy,
            teachers=teachers,
            steps=replace(steps_of(config, components, run), validation=validation),
            rows_per_minibatch=config.policy.train_global_batch_size,
        )


class OfflineDistillation(SupervisedAlgorithm[TextRoot, TextData]):
    """Distillation on given text."""

    def prepare(self, config: TextRoot, tokenizer: Any, loaded: Datasets) -> TextData:
        return prepare_text(config, tokenizer, loaded)

    def row_reader(self, config: TextRoot) -> RowReader:
        return text_reader(config)

    def run(self, config: TextRoot, components: Components, run: Run) -> None:
        loss = loss_of(config, vocabulary=components.data.vocabulary)
        objective = text_objective(loss, teachers_of(config, components))
        policy, rows = components.models["policy"], config.policy.train_global_batch_size
        learn(config.distillation, objective, policy, components.data, run, batch_size=rows)


def loss_of(config: TextRoot | RolloutsRoot, *, vocabulary: int) -> DistillationLoss | WholeDistillationLoss:
    """The loss of a run.

    Args:
        config: Resolved config of the run.
        vocabulary: Number of tokens that student and teachers share.
    """
    settings: DistillationLossConfig = config.loss_fn
    divergence = Divergence(settings.kl_type, settings.mixed_kl_weight, settings.jensen_shannon_beta)
    if not sends_hidden(config.distillation.topk_logits_k, vocabulary):
        return DistillationLoss(divergence, nll_weight=settings.nll_weight, temperature=settings.temperature)
    return WholeDistillationLoss(
        tuple(head_files(attrgetter(key)(config)) for key in teacher_sections(config).values()),
        vocabulary,
        divergence,
        nll_weight=settings.nll_weight,
        temperature=settings.temperature,
    )


def head_files(teacher: ModelConfig) -> HeadFiles:
    """The head of a teacher, for the student's ranks to read."""
    return HeadFiles(teacher.model_name, teacher.precision, json.dumps(teacher.hf_config_overrides, sort_keys=True))


def _comparison(config: TextRoot | RolloutsRoot, components: Components) -> tuple[Loss, RolloutScorer]:
    """The loss of a run on rollouts, and who says what it needs to know."""
    translator: Translator | None = components.data.translator
    if translator is None:
        return loss_of(config, vocabulary=components.data.vocabulary), teachers_of(config, components)
    loss = SpanLoss(config.loss_fn.span_tau, config.loss_fn.temperature)
    longest = attrgetter("teacher.max_total_sequence_length")(config)
    model = components.models["teacher"]
    return loss, SpanTeacher(model, translator, max_tokens=longest, temperature=loss.temperature)


def text_objective(loss: DistillationLoss | WholeDistillationLoss, teachers: Teachers) -> Objective[TextRow]:
    """The objective of learning from text that teachers score."""

    def complete(batch: Batch, policy: Model) -> Batch:
        return teachers.scored_rows(batch, batch.array(TEACHER).tolist())

    return Objective(loss, to_batch, complete)


def to_batch(rows: Sequence[TextRow]) -> Batch:
    """Text as the columns that the loss needs, and `teacher`, the role of each row's teacher."""
    return text_batch([row.row for row in rows]).with_columns({TEACHER: np.array([row.teacher for row in rows])})


def teachers_of(config: TextRoot | RolloutsRoot, components: Components) -> Teachers:
    """The teachers of a run."""
    vocabulary = components.data.vocabulary
    models = {role: components.models[role] for role in teacher_sections(config)}
    k = config.distillation.topk_logits_k
    reads = [topk(k or vocabulary, below=vocabulary)]
    if sends_hidden(k, vocabulary):
        reads = [HIDDEN if len(models) == 1 else hidden_states(_widest(config)), LOGPROBS]
    return Teachers(models, reads, temperature=config.loss_fn.temperature)


def _widest(config: TextRoot | RolloutsRoot) -> int:
    """The largest hidden size of the teachers."""
    # imports torch where it is installed
    from transformers import AutoConfig

    teachers = [attrgetter(key)(config) for key in teacher_sections(config).values()]
    found = [
        AutoConfig.from_pretrained(each.model_name, trust_remote_code=False, **each.hf_config_overrides)
        for each in teachers
    ]
    return max(each.get_text_config().hidden_size for each in found)
