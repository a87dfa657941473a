"""Prompts, what is sampled from them, and what that earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and what a chat template understands besides (tool calls, names)."""

StopReason = Literal["stop", "length", "abort"]
Status = Literal["ok", "truncated", "failed"]


@dataclass(frozen=True)
class Prompt:
    """What a rollout starts from.

    Args:
        id: unique within the dataset and stable across runs, so that exactly-once can be proved.
        messages: the conversation so far.
        token_ids: int32 `[tokens]`, the conversation rendered by the chat template and tokenised, ready for generation.
        environment: name of the environment that scores it.
        info: what the environment needs besides the conversation (the answer, a seed).
        dataset: name of the dataset it came from.
    """

    id: str
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    environment: str
    info: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""


@dataclass(frozen=True)
class WeightSpan:
    """A run of sampled tokens and the weight version they were sampled with."""

    version: int
    num_tokens: int


@dataclass(frozen=True)
class Completion:
    """One answer of a generator.

    Args:
        token_ids: int32 `[tokens]`, the sampled tokens, the stop token included.
        logprobs: float32 `[tokens]`, processed logprobs (after temperature, top-k, top-p) of those tokens.
        stop_reason: `stop` (stop token or string), `length` (token limit), `abort` (cut off from outside).
        spans: the weight versions, in order; their token counts add up to the tokens.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    spans: tuple[WeightSpan, ...]


@dataclass(frozen=True)
class Turn:
    """One exchange: what the policy said and what the environment answered (`None` at the end)."""

    text: str
    observation: tuple[Message, ...] | None
    rewards: Mapping[str, float]


@dataclass(frozen=True)
class Rollout:
    """One whole trajectory.

    Args:
        prompt_id: of the prompt it came from.
        tokens: int32 `[tokens]`, prompt, completions and observations in order; sampled tokens are never re-tokenised.
        loss_mask: uint8 `[tokens]`, 1 only on tokens the policy sampled.
        generation_logprobs: float32 `[tokens]`, the engine's, 0 where `loss_mask` is 0.
        spans: weight version of each run of sampled tokens, in order.
        turns: texts and rewards by turn, for people to read.
        rewards: reward by name, summed over turns; `reward` is the one trained on.
        stop_reason: of the last completion.
        status: `failed` trains nothing and counts in no statistic; `truncated` ran into a length or turn limit.
        failure: why it failed, empty otherwise.
        info: what the environment reported (numbers are averaged into metrics).
        routed_experts: int16 `[tokens, layers, experts_per_token]` where the engine reports them.
    """

    prompt_id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    generation_logprobs: np.ndarray
    spans: tuple[WeightSpan, ...]
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float]
    stop_reason: StopReason
    status: Status = "ok"
    failure: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None

    @property
    def reward(self) -> float:
        """The reward trained on; 0.0 for a failed rollout."""
        return float(self.rewards.get("reward", 0.0))

    @property
    def num_sampled(self) -> int:
        """Number of tokens the policy sampled."""
        return int(self.loss_mask.sum())

    @classmethod
    def failed(cls, prompt: Prompt, reason: str) -> Rollout:
        """A rollout that trains nothing and says why."""
        length = len(prompt.token_ids)
        return cls(
            prompt_id=prompt.id,
            tokens=np.asarray(prompt.token_ids, dtype=np.int32),
            loss_mask=np.zeros(length, dtype=np.uint8),
            generation_logprobs=np.zeros(length, dtype=np.float32),
            spans=(),
            turns=(),
            rewards={},
            stop_reason="abort",
            status="failed",
            failure=reason,
        )


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt, in the order of their seeds."""

    prompt: Prompt
    rollouts: Sequence[Rollout]

    def rewards(self) -> np.ndarray:
        """float64 `[rollouts]`, the rewards trained on; NaN for failed rollouts."""
        return np.array([np.nan if r.status == "failed" else r.reward for r in self.rollouts], dtype=np.float64)
