"""Settings of reward models."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field

from rl_algos.losses.preference import MarginUse
from rl_algos.preference.config import PreferenceConfig, PreferenceRoot


class RewardModelConfig(PreferenceConfig):
    """A reward model: the policy's architecture with a scalar score head instead of the language-model head."""

    loss: Literal["bradley-terry", "regression", "process"] = "bradley-terry"
    """Loss of the reward model: `bradley-terry` trains on pairs, so that the better response gets the higher score;
    `regression` trains on the `score` of each response in the data; `process` trains on the labels of the steps of a
    response, so that the score at the end of a step is the logit of its label (a process reward model)."""
    score_weights: dict[str, float] = {}
    """Weights of the scores for several objectives that each response of the data has, by the names of their columns,
    such as `{helpfulness: 0.65, correctness: 0.8}`. With `loss: regression`, the score to learn is their weighted sum;
    if empty, the column `score`."""
    step_end: str = Field(default="\n\n", min_length=1)
    """String that is put between the steps of a response with `loss: process`. A judge of such a model needs the same
    `step_end`."""
    margin: MarginUse = "ignore"
    """How to use the margin of a pair: `ignore` it, `subtract` it from the difference of scores, or `scale` the loss of
    the pair by it. Unless it is ignored, the data must have a `margin`, or scores."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of the two scores of a pair, which keeps scores near 0; 0.01 is usual."""


class RewardModelRoot(PreferenceRoot, Protocol):
    """The resolved config of a reward model, as far as its training reads it."""

    rm: RewardModelConfig
    """Settings of loop and loss."""
