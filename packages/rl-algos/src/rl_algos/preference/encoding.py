"""Responses as tokens, with a mask of what the assistant says in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.sft.conversation import encode_conversation
from rl_algos.tokenizer import render
from rl_core.errors import DataError
from rl_core.rollout import Message


@dataclass(frozen=True)
class EncodedResponse:
    """A conversation that ends with a response.

    Args:
        tokens: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`, 1 on what the assistant says in the response.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


def encode_response(tokenizer: Any, prompt: Sequence[Message], response: Sequence[Message]) -> EncodedResponse:
    """Tokens of prompt and response, and where the response is.

    Raises:
        DataError: if the chat template renders the prompt in another way once the response follows, or the response is
            empty.
        jinja2.TemplateError: if the template refuses the messages.
    """
    messages = [*prompt, *response]
    tokens, mask = encode_conversation(tokenizer, messages)
    if prompt:
        opening = render(tokenizer, prompt, add_generation_prompt=False)
        if not render(tokenizer, messages, add_generation_prompt=False).startswith(opening):
            raise DataError(
                "the chat template renders the prompt in another way once the response follows, so that the two cannot "
                "be told apart; set policy.tokenizer.chat_template to one that leaves earlier turns as they are"
            )
        mask[: _shared(tokenizer(opening, add_special_tokens=False)["input_ids"], tokens)] = 0
    if not mask.any():
        raise DataError("the response is empty: the assistant says nothing in it")
    return EncodedResponse(tokens, mask)


def _shared(opening: Sequence[int], tokens: np.ndarray) -> int:
    """Length of the common beginning of both."""
    count = min(len(opening), len(tokens))
    differs = np.flatnonzero(np.asarray(opening[:count], dtype=tokens.dtype) != tokens[:count])
    return int(differs[0]) if len(differs) else count
