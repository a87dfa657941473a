"""A rollout of one completion, which no environment answers."""

from __future__ import annotations

import dataclasses
from typing import Any

from rl_algos.rollouts.worker.transcript import Transcript
from rl_core.images import image_digests
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Prompt, Rollout

REPLY_PROGRAM = f"{__name__}:ReplyProgram"
"""The program, as `rl_core.plugins.RolloutNeeds` names it."""


class ReplyProgram:
    """Generate one completion and end, without an environment.

    Args:
        max_tokens: Maximum number of tokens of prompt and completion.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout:
        """Generate the completion of a prompt.

        Raises:
            ValueError: If the prompt leaves no room for a completion.
        """
        room = self._max_tokens - len(prompt.token_ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt.token_ids)} tokens; a rollout may have {self._max_tokens}")
        sampling = dataclasses.replace(client.sampling, max_new_tokens=min(room, client.sampling.max_new_tokens))
        images = image_digests(prompt.messages)
        told: dict[str, Any] = {"images": images} if images else {}
        transcript = Transcript(prompt, images=images)
        completion = await client.generate(prompt.token_ids, sampling, **told)
        transcript.add_completion(completion)
        reply = client.read(completion.token_ids)
        transcript.add_result(reply.text, StepResult(done=True), ends=True)
        return transcript.rollout(truncated=completion.stop_reason != "stop")
