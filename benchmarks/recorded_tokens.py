"""Rollouts whose records hold their tokens, and a reward that random models earn now and then."""

from __future__ import annotations

import dataclasses

from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Prompt, Rollout


class RecordedTokens(MultiTurnProgram):
    """The default rollout, which also writes its tokens and the engine's logprobs to `rollouts/step_<n>.jsonl`."""

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout:
        """Play one rollout."""
        rollout = await super().run(prompt, client)
        recorded = {
            "tokens": rollout.tokens.tolist(),
            "loss_mask": rollout.loss_mask.tolist(),
            "logprobs": rollout.generation_logprobs.tolist(),
        }
        return dataclasses.replace(rollout, info={**rollout.info, **recorded})


def score(response: str) -> float:
    """Return the share of the characters that are lowercase letters."""
    return sum(character.islower() for character in response) / max(1, len(response))
