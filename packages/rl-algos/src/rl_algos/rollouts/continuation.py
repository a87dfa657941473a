"""Tokens between two turns of the policy, without re-tokenising what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_core.rollout import Message


def continuation_tokens(
    tokenizer: Any, messages: Sequence[Message], observation: Sequence[Message], sampled: np.ndarray
) -> np.ndarray:
    """Tokens that the chat template puts between a sampled turn and the start of the next one.

    Args:
        tokenizer: with a chat template.
        messages: the conversation up to and with the sampled turn.
        observation: the environment's answer.
        sampled: int32 `[tokens]`, the turn as sampled; a missing end of turn is supplied.

    Returns:
        int32 `[tokens]`.

    Raises:
        ValueError: if the template rewrites earlier turns when later ones are added, so that no continuation exists.
    """
    before = tokenizer.apply_chat_template(list(messages), tokenize=False)
    after = tokenizer.apply_chat_template([*messages, *observation], tokenize=False, add_generation_prompt=True)
    if not after.startswith(before):
        raise ValueError(
            "the chat template rewrites earlier turns when an observation is added, so a multi-turn rollout cannot be "
            "continued token by token; set policy.tokenizer.chat_template to one that only appends"
        )
    end_of_turn = tokenizer.eos_token
    closing = before.rsplit(end_of_turn, 1)[1] if end_of_turn in before else ""
    ended = len(sampled) > 0 and int(sampled[-1]) == tokenizer.eos_token_id
    text = ("" if ended else end_of_turn) + closing + after[len(before) :]
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
