"""Turns whose thoughts end within a budget, for every engine.

A turn is first requested up to the budget. If its thoughts are still open there, either the turn ends, or tokens that
end the thoughts are appended and the turn is requested again after them. The engine sees these tokens as a part of the
prompt, so the logprobs of all sampled tokens are the policy's own, with or without drafts, and forced tokens have none.
Whether thoughts are open follows from the tokens alone: a turn that an interruption divides, or that runs again after a
failure, ends its thoughts at the same token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.interruption import Generate, generate_whole, joined, request_for_rest
from rl_core.rollouts.rollout import Completion, Thinking
from rl_core.rollouts.thoughts import closing_text


class ThoughtReader(Protocol):
    """Reads thoughts from tokens."""

    def thoughts(self, prompt: np.ndarray, completion: np.ndarray) -> tuple[int, str]:
        """Return the number of tokens of a completion up to the end of its thoughts, and the mark that opened thoughts
        which have not ended; empty if none are open.

        Args:
            prompt: int32 `[tokens]`, which may open thoughts at its end.
            completion: int32 `[tokens]`, after the prompt.
        """

    def encoded(self, text: str) -> np.ndarray:
        """Return int32 `[tokens]` of a string; the strings of special tokens become these tokens."""


async def generate_turn(generate: Generate, request: GenerationRequest, reader: ThoughtReader) -> Completion:
    """Return one completion as `generate_whole` does, with thoughts within the budget of the request.

    Forced tokens count towards the request's limit. If it leaves no room for an answer after them, the completion ends
    at the budget instead.
    """
    budget, limit = request.sampling.thinking, request.sampling.max_new_tokens
    if budget is None:
        return await generate_whole(generate, request)
    request = replace(request, sampling=replace(request.sampling, thinking=None))
    until = replace(request.sampling, max_new_tokens=min(budget.max_tokens, limit))
    first = await generate_whole(generate, replace(request, sampling=until))
    num_tokens, mark = reader.thoughts(request.token_ids, first.token_ids)
    if first.stop_reason == "stop" or len(first.token_ids) < budget.max_tokens or limit == budget.max_tokens:
        return replace(first, thinking=Thinking(num_tokens))
    if not mark:
        rest = await generate_whole(generate, request_for_rest(request, [first]))
        whole = joined([first, rest])
        return replace(whole, thinking=Thinking(reader.thoughts(request.token_ids, whole.token_ids)[0]))
    forced = reader.encoded(budget.text or closing_text(mark)) if budget.closes else first.token_ids[:0]
    if not len(forced) or num_tokens + len(forced) >= limit:
        return replace(first, thinking=Thinking(num_tokens, is_cut=True))
    end = Completion(forced, np.zeros(len(forced), dtype=np.float32), "abort", ())
    rest = await generate_whole(generate, request_for_rest(request, [first, end]))
    return replace(joined([first, end, rest]), thinking=Thinking(num_tokens, len(forced), is_cut=True))
