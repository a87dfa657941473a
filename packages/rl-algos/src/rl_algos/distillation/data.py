"""Data of distillation, and checks of the teachers, which must agree with the student on its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rl_algos.data.examples import Dataset
from rl_algos.distillation.config import DEFAULT_K, RolloutsRoot, TextRoot, teacher_sections
from rl_algos.distillation.span_teacher import Translator
from rl_algos.distillation.teachers import teacher_of
from rl_algos.rollouts.data import RolloutData
from rl_algos.sft.data import TrainingRow
from rl_algos.supervised.data import SupervisedData
from rl_algos.tokenizer import different_token, plain_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_core.tokenizer import Tokenizer

UNSCORED = "rl_algos.distillation.unscored:unscored"
"""Environment of prompts that name none."""


@dataclass(frozen=True)
class DistillationData(RolloutData):
    """Data that the driver loads for distillation on the student's own rollouts.

    Args:
        vocabulary: Number of tokens that student and teachers share.
        translator: Translator to the tokens of a teacher that has other tokens; None if it has the student's.
    """

    vocabulary: int
    translator: Translator | None = None


@dataclass(frozen=True)
class TextRow:
    """A given text.

    Args:
        row: Its tokens, with a mask of the learned ones.
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


def require_teacher(config: TextRoot | RolloutsRoot, dataset: Dataset, *names: str) -> str:
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


BYTES_PER_TOKEN = 8
"""Bytes of an id and a logprob that the teacher sends to the student."""

MAX_BYTES = 64 * 2**10
"""Maximum number of bytes for the teacher's tokens of one position."""


def sends_hidden(k: int | None, vocabulary: int) -> bool:
    """Return whether the teacher's hidden states are sent instead of its most likely tokens, because the loss reads all
    tokens of a vocabulary that is too large to send.

    Args:
        k: Configured number of tokens; None for the whole vocabulary.
        vocabulary: Number of tokens.
    """
    return k is None and BYTES_PER_TOKEN * vocabulary > MAX_BYTES


def check_k(k: int | None, vocabulary: int) -> None:
    """Refuse more of the teacher's tokens than there are, or than can travel.

    Args:
        k: Configured number of tokens; None for the whole vocabulary.
        vocabulary: Number of tokens.

    Raises:
        ConfigError: With the bytes of a position.
    """
    if sends_hidden(k, vocabulary):
        return
    if k is not None and k > vocabulary:
        raise ConfigError(
            f"distillation.topk_logits_k: got {k}, but the tokenizer has only {vocabulary} tokens. Set it to at most "
            f"{vocabulary}, or to null for all tokens"
        )
    size = BYTES_PER_TOKEN * (k or vocabulary)
    if size > MAX_BYTES:
        raise ConfigError(
            f"distillation.topk_logits_k: {k} takes {size:,} bytes per token of text (ids and logprobs); the limit is "
            f"{MAX_BYTES:,}. Set it to at most {MAX_BYTES // BYTES_PER_TOKEN}, such as {DEFAULT_K}, so that all "
            "other tokens count together as the tail. Or set it to null for all tokens, which sends only the "
            "teacher's hidden states"
        )


def check_teachers(config: TextRoot | RolloutsRoot, tokenizer: Tokenizer) -> None:
    """Refuse a teacher whose tokens differ from the student's. A teacher without tokenizer files is assumed to have the
    same tokens.

    Raises:
        ConfigError: With the first token that differs.
    """
    for key in teacher_sections(config).values():
        name = attrgetter(key)(config).model_name
        if name != config.policy.model_name and (differs := different_token(name, tokenizer, whose="the student's")):
            raise ConfigError(
                f"{key}.model_name: the tokenizer of {name!r} differs from the student's: {differs}. Choose a teacher "
                "with the same tokens, or compare spans of text with algorithm: distillation and "
                "distillation.cross_tokenizer=true"
            )


def teacher_tokenizer(config: TextRoot | RolloutsRoot, key: str) -> Any:
    """Return the tokenizer of a teacher that has its own tokens.

    Raises:
        ConfigError: If it has no tokenizer files, no end-of-sequence token or no chat template.
    """
    name = attrgetter(key)(config).model_name
    tokenizer = plain_tokenizer(name)
    if tokenizer is None:
        raise ConfigError(f"{key}.model_name: {name!r} has no tokenizer files; distillation.cross_tokenizer needs them")
    for what, value in (("end-of-sequence token", tokenizer.eos_token), ("chat template", tokenizer.chat_template)):
        if value is None:
            raise ConfigError(f"{key}.model_name: the tokenizer of {name!r} has no {what}; choose an instruct model")
    return tokenizer
