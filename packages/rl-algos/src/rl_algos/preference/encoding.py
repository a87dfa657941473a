"""Responses as tokens, with a mask of the assistant's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.data.learned_flags import without_flags
from rl_algos.data.stored_rows import storable
from rl_algos.sft.conversation import encode_conversation
from rl_core.errors import DataError
from rl_core.images import image_digests
from rl_core.rollouts.rollout import Message


@storable
@dataclass(frozen=True)
class EncodedResponse:
    """A conversation that ends with a response.

    Args:
        tokens: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`, 1 on the assistant's text in the response.
        images: Digests of the images, in the order of their tokens.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    images: tuple[str, ...] = ()


def encode_response(
    tokenizer: Any,
    prompt: Sequence[Message],
    response: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> EncodedResponse:
    """Tokens of prompt and response, with a mask of the response.

    Args:
        tokenizer: Tokenizer with a chat template.
        prompt: Messages before the response, none of which is learned.
        response: Messages of the response, of which the assistant's text is learned.
        tools: JSON schemas of the tools that the assistant may call.

    Raises:
        DataError: If the chat template renders the prompt in another way once the response follows, or the response is
            empty.
        jinja2.TemplateError: if the template refuses the messages.
    """
    tokens, mask = encode_conversation(tokenizer, [*map(_not_learned, prompt), *response], tools=tools)
    if not mask.any():
        raise DataError("the response is empty: it contains no assistant text")
    return EncodedResponse(tokens, mask, image_digests([*prompt, *response]))


def _not_learned(message: Message) -> Message:
    """The message, marked as what the loss leaves out."""
    return {**without_flags(message), "train": False}
