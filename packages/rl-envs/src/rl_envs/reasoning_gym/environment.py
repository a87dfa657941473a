"""The `reasoning_gym` environment; imports reasoning-gym."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import create_dataset

from rl_core.rollouts.environment import Conversation, StepResult
from rl_envs.grader import Grader
from rl_envs.math.extraction import last_box
from rl_envs.reasoning_gym.plugin import AnswerFormat, ReasoningGymConfig

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
SHOWN = 200
"""Maximum number of characters of an extracted answer that are reported."""


class ReasoningGymEnvironment(Grader[ReasoningGymConfig]):
    """Scores a single turn by the task's own scorer; prompts come from this package's dataset."""

    def score(self, conversation: Conversation) -> StepResult:
        info = conversation.info
        missing = sorted({"task", "task_config", "entry", "answer_format"} - set(info))
        if missing:
            raise ValueError(
                f"the prompt's info lacks {missing}; prompts of reasoning_gym must come from the dataset reasoning_gym"
            )
        answer = extract(conversation.final_text, info["answer_format"])
        score = 0.0
        if answer is not None:
            score = float(_scorer(info["task"], info["task_config"]).score_answer(answer, _entry(info["entry"])))
        report = {"score": score, "accuracy": float(score >= 1.0), "answer": (answer or "")[:SHOWN]}
        if not self._config.format_reward:
            return StepResult(reward=score, info=report)
        formed = self._config.format_reward if answer is not None else 0.0
        return StepResult(reward={"reward": score + formed, "score": score, "format": formed}, info=report)


def extract(completion: str, answer_format: AnswerFormat) -> str | None:
    """Return the last answer in the requested format; None if there is none."""
    match answer_format:
        case "tag":
            tagged = _TAG.findall(completion)
            answer = tagged[-1] if tagged else ""
        case "boxed":
            answer = last_box(completion) or ""
        case "plain":
            answer = completion
    return answer.strip() or None


@lru_cache(maxsize=64)
def _scorer(task: str, config: str) -> Any:
    return create_dataset(task, **ast.literal_eval(config), seed=0, size=1)


_entry = lru_cache(maxsize=256)(ast.literal_eval)  # All rollouts of a group share their entry.
