"""The `math` environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult
from rl_envs.math.config import MathConfig
from rl_envs.math.extraction import extract
from rl_envs.math.known_answer import known_answers
from rl_envs.math.verdict import judge_in_time

SHOWN = 200
"""Maximum number of characters of an extracted answer that are reported."""


class MathEnvironment:
    """Scores a single turn by its final answer; the known one is `info["answer"]`, or any of several in a list.

    An answer of which it cannot be decided whether it is right counts as wrong and as `unparsed`; so does one that
    takes too much processor time.
    """

    def __init__(self, config: MathConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        config = self._config
        known = known_answers(conversation.info, config.answer_format)
        found = extract(conversation.final_text, known.answer_format)
        verdicts = (
            [] if found is None else [judge_in_time(found.text, each, known.answer_format) for each in known.answers]
        )
        correct = True in verdicts
        well_formed = found is not None and (found.in_box or config.answer_format != "auto")
        reward = config.correct_reward if correct else config.wrong_reward
        undecided = not correct and None in verdicts
        answer = "" if found is None else found.text[:SHOWN]
        info = {"accuracy": float(correct), "answer": answer, "unparsed": float(undecided)}
        if not config.format_reward:
            return StepResult(reward=reward, info=info)
        formed = config.format_reward if well_formed else 0.0
        return StepResult(reward={"reward": reward + formed, "correct": reward, "format": formed}, info=info)
