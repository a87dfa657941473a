"""The `reward_model` environment; imports torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import final_text
from rl_envs.reward_model.config import RewardModelConfig
from rl_envs.reward_model.scorer import Scorer

DECIMALS = 4
"""Digits of a score; further ones depend on the other responses of the forward pass."""


class RewardModelEnvironment:
    """Scores the newest turn of a conversation, or every one of several turns."""

    def __init__(self, config: RewardModelConfig) -> None:
        if config.model is None:
            raise ValueError("it has no model; set `model` to the folder of a reward model, or to its hub name")
        self._config = config
        self._scorer = Scorer(
            config.model, device=config.device, precision=config.precision, max_length=config.max_length
        )

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        said = [_without_thoughts(conversation) for conversation in conversations]
        compared = zip(conversations, said, strict=True) if self._config.compare_with else ()
        others = [self._other(*each) for each in compared]
        scores = self._scorer.scores([*said, *others])
        own, baselines = scores[: len(said)], scores[len(said) :] or [0.0] * len(said)
        return [self._result(score, baseline) for score, baseline in zip(own, baselines, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _result(self, score: float, baseline: float) -> StepResult:
        value = round(score - baseline, DECIMALS)
        reward = (
            round(1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value)), DECIMALS)
            if self._config.reward == "probability"
            else value
        )
        info = {"score": round(score, DECIMALS)}
        if self._config.compare_with:
            info |= {"score_to_beat": round(baseline, DECIMALS), "accuracy": float(value > 0)}
        return StepResult(reward=reward, info=info)

    def _other(self, conversation: Conversation, said: Sequence[Message]) -> tuple[Message, ...]:
        """The messages of a conversation with the response of the row in place of the newest turn."""
        field = self._config.compare_with
        assert field is not None
        if field not in conversation.info:
            fields = ", ".join(sorted(map(str, conversation.info))) or "none"
            raise UnusableAnswer(
                f"`compare_with` is {field!r}, which is not a field of the row; its fields are {fields}"
            )
        return (*said[:-1], {"role": "assistant", "content": str(conversation.info[field])})


def _without_thoughts(conversation: Conversation) -> tuple[Message, ...]:
    """Return the messages, those of the policy without the thoughts in their text."""
    *before, newest = conversation.messages
    return (*map(_final, before), _final(newest, conversation.opened_thoughts))


def _final(message: Message, opened: str = "") -> Message:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": final_text(content, opened)}
