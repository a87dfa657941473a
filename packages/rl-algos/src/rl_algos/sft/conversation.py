"""Training conversations as tokens, with a mask of the assistant's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from rl_algos.sft.config import LearnedTurns
from rl_algos.tokenizer import render
from rl_core.errors import DataError
from rl_core.rollout import Message

Span = tuple[int, int]

LEARNED_FLAGS = ("train", "weight")
"""Keys by which a message says whether it is learned; the second is that of OpenAI's files."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], *, learn: LearnedTurns = "all"
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a conversation with a mask of the loss: the assistant's text and the token that ends its turn.

    The assistant's text is the part that the template marks by `{% generation %}`, or, in a template without it, the
    text that a rendered turn adds to the prompt before it.

    Args:
        learn: all turns of the assistant or the last one; a message that says `train: true` or `train: false` (or
            `weight: 1` or `weight: 0`) decides for itself. Templates are not shown what it says.

    Returns:
        int32 `[tokens]` and uint8 `[tokens]`; the mask of the first token, which nothing predicts, is 0.

    Raises:
        DataError: if no message of the assistant is to be learned, or if the template rewrites earlier turns when later
            ones are added.
        jinja2.TemplateError: if the template refuses the messages.
    """
    learned = learned_messages(messages, learn)
    plain = [{key: value for key, value in message.items() if key not in LEARNED_FLAGS} for message in messages]
    template = tokenizer.get_chat_template()
    text, spans = (
        _marked(tokenizer, template, plain, learned)
        if _GENERATION.search(template)
        else _by_prefix(tokenizer, plain, learned)
    )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = list(encoding["input_ids"])
    mask = _mask(encoding["offset_mapping"], spans)
    _include_turn_ends(tokenizer, tokens, mask, closed=spans[-1][1] >= len(text.rstrip()))
    mask[0] = 0
    return np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=np.uint8)


def learned_messages(messages: Sequence[Message], learn: LearnedTurns) -> list[bool]:
    """By message: whether it is learned.

    Raises:
        DataError: if none is, or a flag is not one.
    """
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the conversation has no assistant message to learn from, only {roles}; "
            "give messages that end with one, or an output_key"
        )
    by_default = set(spoken) if learn == "all" else {spoken[-1]}
    learned = []
    for index, message in enumerate(messages):
        flag = _flag(index, message)
        if flag and index not in spoken:
            raise DataError(
                f"message {index} (from 0) is to be learned, but its role is {message['role']!r}: only what the "
                "assistant says is learned; remove the flag"
            )
        learned.append(index in by_default if flag is None else flag)
    if not any(learned):
        raise DataError(
            "every message of the assistant is marked as not to be learned; mark one, or leave the row out of the data"
        )
    return learned


def _flag(index: int, message: Message) -> bool | None:
    given = [key for key in LEARNED_FLAGS if key in message]
    if len(given) > 1:
        raise DataError(f"message {index} (from 0) has both `train` and `weight`; remove one")
    for key in given:
        if message[key] not in (0, 1):
            allowed = "true or false" if key == "train" else "0 or 1"
            raise DataError(f"message {index} (from 0): `{key}` is {allowed}, got {message[key]!r}")
        return bool(message[key])
    return None


def _marked(
    tokenizer: Any, template: str, messages: Sequence[Message], learned: Sequence[bool]
) -> tuple[str, list[Span]]:
    """Rendered text and the spans that the template marks of learned messages."""
    rendered, spans = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    wanted = [flag for flag, message in zip(learned, messages, strict=True) if message["role"] == "assistant"]
    if not all(wanted) and len(spans[0]) != len(wanted):
        raise DataError(
            f"the chat template marks {len(spans[0])} parts by {{% generation %}} for {len(wanted)} messages of the "
            "assistant, so those to learn cannot be told from the others; learn all of them, or set "
            "policy.tokenizer.chat_template to one that marks each message once"
        )
    chosen = spans[0] if all(wanted) else [span for span, flag in zip(spans[0], wanted, strict=True) if flag]
    marked = [(start, end) for start, end in chosen if end > start]
    if not marked:
        raise DataError("the chat template's {% generation %} block marks nothing of this conversation")
    return rendered[0], marked


def _by_prefix(tokenizer: Any, messages: Sequence[Message], learned: Sequence[bool]) -> tuple[str, list[Span]]:
    """Rendered text and what each learned turn adds to the prompt before it."""
    text = render(tokenizer, messages, add_generation_prompt=False)
    spans = []
    for index in (index for index, flag in enumerate(learned) if flag):
        prompt = render(tokenizer, messages[:index], add_generation_prompt=True) if index else ""
        turn = render(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise DataError(
                f"the chat template rewrites earlier turns, so what the assistant says in message {index} cannot be "
                "told from the rest; set policy.tokenizer.chat_template to one that marks it with {% generation %}, "
                "or sft.learn: last, if the last turn is the one to learn"
            )
        spans.append((len(prompt), len(prompt) + _said(tokenizer, turn[len(prompt) :])))
    return text, spans


def _said(tokenizer: Any, turn: str) -> int:
    """Length of what was said: the turn without the white space that a template puts behind its end token."""
    said = turn.rstrip()
    return len(said) if said.endswith(tuple(_special_tokens(tokenizer))) else len(turn)


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """1 for tokens that start inside a span; a token that straddles its start belongs to the prompt."""
    starts = np.array([start for start, _ in offsets], dtype=np.int64)
    bounds = np.array(spans, dtype=np.int64)
    span = np.searchsorted(bounds[:, 0], starts, side="right") - 1
    inside: list[int] = ((span >= 0) & (starts < bounds[span, 1])).astype(int).tolist()
    return inside


def _include_turn_ends(tokenizer: Any, tokens: list[int], mask: list[int], *, closed: bool) -> None:
    """Put the token that ends each assistant turn under the loss; a last turn without one gets the end of sequence."""
    special = {tokenizer.convert_tokens_to_ids(token) for token in _special_tokens(tokenizer)}
    ends = [index + 1 for index, (now, then) in enumerate(pairwise([*mask, 0])) if now and not then]
    for end in ends:
        if tokens[end - 1] in special:
            continue
        if end < len(tokens) and tokens[end] in special:
            mask[end] = 1
        elif end == ends[-1] and closed:
            tokens[end:] = [tokenizer.eos_token_id]
            mask[end:] = [1]


def _special_tokens(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
