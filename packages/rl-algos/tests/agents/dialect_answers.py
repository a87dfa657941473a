"""Answers as a session gives them, for tests of how dialects write them."""

import numpy as np

from rl_algos.agents.calls import ModelAnswer, ModelChoice
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.rollout import Completion, WeightSpan

MADE = (ToolCall("add", {"a": 1, "b": "é"}, id="0a1b2c3d4"), ToolCall("add", {}, id="1a1b2c3d4"))


def completion(num_tokens: int = 3) -> Completion:
    logprobs = np.array([-0.5] * num_tokens, np.float32)
    return Completion(np.arange(num_tokens, dtype=np.int32), logprobs, "stop", (WeightSpan(1, num_tokens),))


def choice(text="Hi.", thoughts="", calls=(), reason="stop", pieces=(), stop=""):
    return ModelChoice(text, thoughts, tuple(calls), reason, completion(), tuple(pieces), stop)


def answer(*choices: ModelChoice) -> ModelAnswer:
    return ModelAnswer("rl-0123456789abcdef", 1000, choices or (choice(),), 10, 4)
