"""The default rollout: the policy and an environment take turns."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

import numpy as np

from rl_algos.rollouts.worker.transcript import Transcript
from rl_core.rollouts.environment import Conversation, StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout


class MultiTurnProgram:
    """Generate, step the environment, append its observation; until it is done or a limit is reached.

    Args:
        max_turns: Maximum number of completions.
        max_tokens: Maximum number of tokens of the whole rollout, or of each segment of one that is split.
        split: Render the whole conversation for every turn, and begin a segment where the chat template rewrites
            earlier turns; otherwise go on from the tokens as they are.
    """

    def __init__(self, *, max_turns: int, max_tokens: int, split: bool = False) -> None:
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._split = split

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout:
        """Play one rollout."""
        transcript = Transcript(prompt)
        messages: list[Message] = list(prompt.messages)
        # unlike any before it, for an environment may still know those of a rollout worker that died
        identity = f"{prompt.id}/{uuid.uuid4().hex}"
        sampling = client.sampling
        for turn in range(1, self._max_turns + 1):
            completion = await client.generate(transcript.tokens, self._within(sampling, transcript))
            transcript.add_completion(completion)
            reply = client.read(completion.token_ids)
            messages.append(reply.message)
            cut = completion.stop_reason != "stop"
            result = await client.step(
                Conversation(identity, tuple(messages), prompt.info, reply.text, cut, turn - 1, reply.tool_calls)
            )
            # an observation that nothing follows need not be rendered
            goes_on = not (result.done or cut or turn == self._max_turns)
            messages.extend(result.observation if goes_on else ())
            so_far = transcript.tokens
            following = self._following(client, so_far, messages, result, completion) if goes_on else so_far
            fits = len(following) < self._max_tokens
            ends = not (goes_on and fits)
            transcript.add_result(reply.text, result, ends=ends)
            if ends:
                return transcript.rollout(truncated=cut or not result.done)
            transcript.go_on(following)
            sampling = _for_next_turn(sampling, client.sampling, result)
        raise AssertionError("the last turn ends the rollout")

    def _within(self, sampling: SamplingParams, transcript: Transcript) -> SamplingParams:
        room = self._max_tokens - len(transcript.tokens)
        if room < 1:
            raise ValueError(f"the prompt has {len(transcript.tokens)} tokens; a rollout may have {self._max_tokens}")
        return sampling if sampling.max_new_tokens <= room else dataclasses.replace(sampling, max_new_tokens=room)

    def _following(
        self,
        client: GenerationClient,
        so_far: np.ndarray,
        messages: Sequence[Message],
        result: StepResult,
        completion: Completion,
    ) -> np.ndarray:
        """int32 `[tokens]` that the engine consumes for the next turn.

        Args:
            client: Client of the engine, which renders and tokenises messages.
            so_far: All tokens of the last request and its completion.
            messages: The conversation with the newest turn and the observation of it.
            result: Answer of the environment to the newest turn.
            completion: Completion that the newest turn was read from.
        """
        if not result.observation:
            raise ValueError("the environment returned no observation, so there is nothing for the policy to answer")
        if self._split:
            return client.rendered(messages, so_far)
        turn = messages[-len(result.observation) - 1]
        return np.concatenate([so_far, client.continuation(turn, result.observation, completion.token_ids)])


def _for_next_turn(present: SamplingParams, configured: SamplingParams, result: StepResult) -> SamplingParams:
    """How the turn after a result is drawn; stop strings stay until others come, a limit is for one turn."""
    most = configured.max_new_tokens
    return dataclasses.replace(
        present,
        stop_strings=present.stop_strings if result.stop_strings is None else result.stop_strings,
        max_new_tokens=most if result.max_new_tokens is None else min(result.max_new_tokens, most),
    )
