"""Training conversations as tokens, with a mask of what the assistant says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from rl_algos.tokenizer import render
from rl_core.errors import DataError
from rl_core.rollout import Message

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a conversation and where the loss applies: what the assistant says and the token that ends its turn.

    What the assistant says is what the template marks by `{% generation %}`, or, in a template without it, what a
    rendered turn adds to the prompt before it.

    Returns:
        int32 `[tokens]` and uint8 `[tokens]`; the mask of the first token, which nothing predicts, is 0.

    Raises:
        DataError: where no message is the assistant's, or where the template rewrites earlier turns when later ones
            are added.
        jinja2.TemplateError: where the template refuses the messages.
    """
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the conversation has no assistant message to learn from, only {roles}; "
            "give messages that end with one, or an output_key"
        )
    template = tokenizer.get_chat_template()
    text, spans = (
        _marked(tokenizer, template, messages) if _GENERATION.search(template) else _by_prefix(tokenizer, messages)
    )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = list(encoding["input_ids"])
    mask = _mask(encoding["offset_mapping"], spans)
    _include_turn_ends(tokenizer, tokens, mask, closed=spans[-1][1] >= len(text.rstrip()))
    mask[0] = 0
    return np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=np.uint8)


def _marked(tokenizer: Any, template: str, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Rendered text and the spans that the template marks."""
    rendered, spans = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    marked = [(start, end) for start, end in spans[0] if end > start]
    if not marked:
        raise DataError("the chat template's {% generation %} block marks nothing of this conversation")
    return rendered[0], marked


def _by_prefix(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Rendered text and what each assistant turn adds to the prompt before it."""
    text = render(tokenizer, messages, add_generation_prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:index], add_generation_prompt=True) if index else ""
        turn = render(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise DataError(
                f"the chat template rewrites earlier turns, so what the assistant says in message {index} cannot be "
                "told from the rest; set policy.tokenizer.chat_template to one that marks it with {% generation %}, "
                "or let each row end with the one turn to learn"
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
