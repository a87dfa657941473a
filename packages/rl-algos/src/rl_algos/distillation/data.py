"""Data of distillation: prompts for the student, or given text, and what both need to know of the teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_algos.data.examples import Dataset, Datasets
from rl_algos.data.lazily import Lazily
from rl_algos.data.preview import RowReader
from rl_algos.distillation.config import RolloutsRoot, TextRoot, teacher_sections
from rl_algos.distillation.span_teacher import Translator
from rl_algos.distillation.teachers import teacher_of
from rl_algos.distillation.vocabulary import check_k, check_teachers, teacher_tokenizer
from rl_algos.rollouts import data as rollout_data
from rl_algos.rollouts.data import RolloutData
from rl_algos.sft.data import TrainingRow, conversation_reader, training_rows
from rl_algos.supervised.data import SupervisedData, longest_row, supervised_data
from rl_algos.tokenizer import require_chat_template
from rl_core.errors import DataError


@dataclass(frozen=True)
class DistillationData(RolloutData):
    """Data that the driver loads for distillation on the student's own rollouts.

    Args:
        vocabulary: Number of tokens that student and teachers share.
        translator: Function from the student's tokens to those of a teacher that has others.
    """

    vocabulary: int
    translator: Translator | None = None


@dataclass(frozen=True)
class TextRow:
    """A given text.

    Args:
        row: Its tokens, and those to learn from.
        teacher: Role of its teacher.
    """

    row: TrainingRow
    teacher: str


@dataclass(frozen=True)
class TextData(SupervisedData[TextRow]):
    """Data that the driver loads for distillation on given text.

    Args:
        vocabulary: Number of tokens that student and teachers share.
    """

    vocabulary: int


def prepare(config: RolloutsRoot, tokenizer: Any, datasets: Datasets) -> DistillationData:
    """Tokenise and check the prompts; each leaves room for a whole completion, and has a teacher.

    Raises:
        DataError: Naming dataset and row, and the remedy.
        ConfigError: If a teacher has other tokens than the student.
    """
    translator = None
    if config.distillation.cross_tokenizer:
        translator = Translator(tokenizer, teacher_tokenizer(config, "teacher"), key="teacher.model_name")
    else:
        check_k(config.distillation.topk_logits_k, len(tokenizer))
        check_teachers(config, tokenizer)
    for dataset in (*datasets.train, *datasets.validation):
        for environment in dataset.environments():
            _require_teacher(config, dataset, environment)
    data = rollout_data.prepare(config, tokenizer, datasets)
    return DistillationData(
        data.train,
        data.validation,
        data.end_of_sequence,
        len(tokenizer),
        translator,
        environments=data.environments,
        turn_ends=data.turn_ends,
    )


def prepare_text(config: TextRoot, tokenizer: Any, datasets: Datasets) -> TextData:
    """Tokenise and check the text; each dataset has a teacher.

    Raises:
        DataError: Naming dataset and row, and the remedy.
        ConfigError: If the tokenizer has no chat template, or a teacher has other tokens than the student.
    """
    require_chat_template(tokenizer)
    check_k(config.distillation.topk_logits_k, len(tokenizer))
    check_teachers(config, tokenizer)

    def rows_of(dataset: Dataset) -> Sequence[TextRow]:
        teacher = _require_teacher(config, dataset)
        longest = longest_row(config.data, config.policy)
        rows = training_rows(dataset, config.data, tokenizer, longest, learn=config.distillation.learn)
        return Lazily(len(rows), lambda index: TextRow(rows[index], teacher))

    rows = supervised_data(config.distillation, config.data, config.policy, datasets, rows_of)
    return TextData(rows.train, rows.validation, len(tokenizer))


def reader(config: RolloutsRoot) -> RowReader:
    """How a run on the student's own rollouts reads its rows, to look at them."""
    return rollout_data.prompt_reader(config, needs_environment=False)


def text_reader(config: TextRoot) -> RowReader:
    """How a run on given text reads its rows, to look at them."""
    return conversation_reader(config.data, config.policy, config.distillation.learn)


def _require_teacher(config: TextRoot | RolloutsRoot, dataset: Dataset, *names: str) -> str:
    """The role of the teacher of a dataset's rows."""
    sections = teacher_sections(config)
    role = teacher_of(sections, *names, dataset.name)
    if not role:
        said = ", ".join(sections.values())
        meant = " or ".join(repr(name) for name in (*names, dataset.name))
        raise DataError(
            f"the dataset {dataset.name!r} has no teacher: there are {said}. Add one with the name {meant} to "
            "`teachers`, or add `teacher`, which serves all other rows"
        )
    return role
