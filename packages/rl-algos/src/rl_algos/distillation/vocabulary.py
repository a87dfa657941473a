"""The vocabularies of student and teachers: they must agree on the tokens that the student has."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from rl_algos.distillation.config import DEFAULT_K, RolloutsRoot, TextRoot, teacher_sections
from rl_algos.tokenizer import different_token, plain_tokenizer
from rl_core.errors import ConfigError

BYTES_PER_TOKEN = 8
"""Of an id and a logprob, as they travel from the teacher to the student."""

MOST_BYTES = 64 * 2**10
"""Bytes that the teacher's tokens of one position may take."""


def sends_hidden(k: int | None, vocabulary: int) -> bool:
    """Return whether the teacher's hidden states are sent instead of its most likely tokens: those are all tokens of a
    vocabulary too large to send.

    Args:
        k: Configured number of tokens; None for the whole vocabulary.
        vocabulary: Number of tokens.
    """
    return k is None and BYTES_PER_TOKEN * vocabulary > MOST_BYTES


def check_k(k: int | None, vocabulary: int) -> None:
    """Refuse more of the teacher's tokens than there are, or than can travel.

    Args:
        k: Configured number of tokens; None for the whole vocabulary.
        vocabulary: Number of tokens.

    Raises:
        ConfigError: Naming the bytes of a position.
    """
    if sends_hidden(k, vocabulary):
        return
    if k is not None and k > vocabulary:
        raise ConfigError(
            f"distillation.topk_logits_k: got {k}, but the tokenizer has only {vocabulary} tokens. Set it to at most "
            f"{vocabulary}, or to null for all tokens"
        )
    size = BYTES_PER_TOKEN * (k or vocabulary)
    if size > MOST_BYTES:
        raise ConfigError(
            f"distillation.topk_logits_k: {k} takes {size:,} bytes per token of text (ids and logprobs); the limit is "
            f"{MOST_BYTES:,}. Set it to at most {MOST_BYTES // BYTES_PER_TOKEN}, such as {DEFAULT_K}, so that all "
            "other tokens count together as the tail. Or set it to null for all tokens, which sends only the "
            "teacher's hidden states"
        )


def check_teachers(config: TextRoot | RolloutsRoot, tokenizer: Any) -> None:
    """Refuse a teacher to whom the student's tokens mean something else. One without tokenizer files is taken to have
    the student's.

    Raises:
        ConfigError: Naming the first token that differs.
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
