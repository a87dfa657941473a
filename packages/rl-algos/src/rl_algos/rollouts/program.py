"""The default rollout: the policy and an environment take turns."""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter

import numpy as np

from rl_core.environment import Conversation, StepResult
from rl_core.generation import GenerationClient, SamplingParams
from rl_core.rollout import Completion, Message, Prompt, Rollout, Turn, WeightSpan, unknown_routing


class Transcript:
    """A rollout as it grows: tokens, mask, logprobs, turns and rewards, always of one length."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._routing: list[np.ndarray] = []
        self._spans: list[WeightSpan] = []
        self._turns: list[Turn] = []
        self._rewards: Counter[str] = Counter()
        self._info: dict[str, object] = {}
        self._stop_reason = "abort"
        self.add_context(prompt.token_ids)

    @property
    def tokens(self) -> np.ndarray:
        """int32 `[tokens]` so far."""
        return np.concatenate(self._tokens)

    def add_context(self, tokens: np.ndarray) -> None:
        """Append tokens that the policy did not sample."""
        self._append(tokens, 0, np.zeros(len(tokens), dtype=np.float32))

    def add_completion(self, completion: Completion) -> None:
        """Append sampled tokens as they are.

        If the experts of a token are reported more than once, the first report stays: that of the pass that sampled it.
        """
        if completion.routed_experts is not None:
            self._routing.append(completion.routed_experts[sum(map(len, self._routing)) :])
        self._append(completion.token_ids, 1, completion.logprobs)
        self._spans.extend(completion.spans)
        self._stop_reason = completion.stop_reason

    def add_result(self, text: str, result: StepResult, *, ends: bool) -> None:
        """Record the text and rewards of a turn."""
        rewards = result.rewards()
        for name, reward in rewards.items():
            self._rewards[name] += reward  # type: ignore[assignment]  # Counter sums floats as well
        self._turns.append(Turn(text, None if ends else tuple(result.observation), rewards))
        self._info.update(result.info)

    def rollout(self, *, truncated: bool) -> Rollout:
        """The finished rollout."""
        return Rollout(
            prompt_id=self._prompt.id,
            tokens=self.tokens,
            loss_mask=np.concatenate(self._mask),
            generation_logprobs=np.concatenate(self._logprobs),
            spans=tuple(self._spans),
            turns=tuple(self._turns),
            rewards={name: float(value) for name, value in self._rewards.items()},
            stop_reason=self._stop_reason,  # type: ignore[arg-type]  # set from Completion.stop_reason
            status="truncated" if truncated else "ok",
            info=dict(self._info),
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> np.ndarray | None:
        if not self._routing:
            return None
        num_missing = len(self.tokens) - sum(map(len, self._routing))
        return np.concatenate([*self._routing, unknown_routing(num_missing, self._routing[0].shape[1:])])

    def _append(self, tokens: np.ndarray, mask: int, logprobs: np.ndarray) -> None:
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._mask.append(np.full(len(tokens), mask, dtype=np.uint8))
        self._logprobs.append(np.asarray(logprobs, dtype=np.float32))


class MultiTurnProgram:
    """Generate, step the environment, append its observation; until it is done or a limit is reached.

    Args:
        max_turns: most completions.
        max_tokens: most tokens of the whole rollout.
    """

    def __init__(self, *, max_turns: int, max_tokens: int) -> None:
        self._max_turns = max_turns
        self._max_tokens = max_tokens

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
            text = client.decode(completion.token_ids)
            messages.append({"role": "assistant", "content": text})
            cut = completion.stop_reason != "stop"
            result = await client.step(Conversation(identity, tuple(messages), prompt.info, text, cut, turn - 1))
            observed = self._observation(client, messages, result, completion)
            fits = len(transcript.tokens) + len(observed) < self._max_tokens
            ends = result.done or cut or turn == self._max_turns or not fits
            transcript.add_result(text, result, ends=ends)
            if ends:
                return transcript.rollout(truncated=cut or not result.done)
            transcript.add_context(observed)
            messages.extend(result.observation)
            if result.stop_strings is not None:
                sampling = dataclasses.replace(sampling, stop_strings=result.stop_strings)
        raise AssertionError("the last turn ends the rollout")

    def _within(self, sampling: SamplingParams, transcript: Transcript) -> SamplingParams:
        room = self._max_tokens - len(transcript.tokens)
        if room < 1:
            raise ValueError(f"the prompt alone has {len(transcript.tokens)} of at most {self._max_tokens} tokens")
        return sampling if sampling.max_new_tokens <= room else dataclasses.replace(sampling, max_new_tokens=room)

    @staticmethod
    def _observation(
        client: GenerationClient, messages: list[Message], result: StepResult, completion: Completion
    ) -> np.ndarray:
        if result.done or not result.observation:
            return np.zeros(0, dtype=np.int32)
        return client.continuation(messages, result.observation, completion.token_ids)
