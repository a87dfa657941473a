"""Scores of prompts, read from rollouts or from their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.rollouts.group import RolloutGroup

ANSWER = "answer"
"""Entry of an environment's `info` that holds the answer which it found in a completion."""


@dataclass(frozen=True)
class SampleScore:
    """One sample of a prompt.

    Args:
        reward: The environment's; 0 for a failed rollout.
        status: as of a rollout: `ok`, `truncated` (it ran into a limit of tokens or turns) or `failed`.
        failure: Why it failed; empty otherwise.
        num_sampled: Tokens that the model sampled.
        answer: The answer that the environment found in the completion; None if it found or reported none.
    """

    reward: float
    status: str = "ok"
    failure: str = ""
    num_sampled: int = 0
    answer: str | None = None


@dataclass(frozen=True)
class PromptScore:
    """All samples of one prompt.

    Args:
        prompt_id: Id of the prompt.
        dataset: Name of the dataset it came from.
        samples: Samples in the order of their seeds.
    """

    prompt_id: str
    dataset: str
    samples: Sequence[SampleScore]

    @classmethod
    def of_group(cls, group: RolloutGroup) -> PromptScore:
        """The scores of a group. Answers, which only its records hold, are left out."""
        rewards = np.nan_to_num(group.rewards()).tolist()
        rows = zip(rewards, group.rollouts.status, group.rollouts.failure, group.rollouts.num_sampled, strict=True)
        return cls(group.prompt.id, group.prompt.dataset, [SampleScore(*row) for row in rows])

    @classmethod
    def of_records(cls, records: Sequence[Mapping[str, Any]]) -> PromptScore:
        """The scores of the records of a group, in any order."""
        ordered = sorted(records, key=lambda record: record["index"])
        return cls(ordered[0]["prompt_id"], ordered[0]["dataset"], [_sample(record) for record in ordered])

    @classmethod
    def refused(cls, prompt_id: str, dataset: str, reason: str, num_samples: int) -> PromptScore:
        """The scores of a prompt that could not be given to the model: every sample fails."""
        return cls(prompt_id, dataset, [SampleScore(0.0, "failed", reason)] * num_samples)

    @property
    def mean(self) -> float:
        """Mean reward of the samples; a failed one earns 0."""
        return float(np.array([sample.reward for sample in self.samples]).mean())

    @property
    def reports_answers(self) -> bool:
        """True if the environment reported an answer for a sample."""
        return any(sample.answer is not None for sample in self.samples)

    def num_passed(self, threshold: float) -> int:
        """Samples whose reward is at least the threshold; a failed one never passes."""
        return sum(sample.status != "failed" and sample.reward >= threshold for sample in self.samples)


def _sample(record: Mapping[str, Any]) -> SampleScore:
    failed = record["status"] == "failed"
    answer = record["info"].get(ANSWER)
    return SampleScore(
        reward=0.0 if failed else float(np.nan_to_num(record["rewards"].get("reward", 0.0))),
        status=record["status"],
        failure=record["failure"],
        num_sampled=record["num_sampled"],
        answer=None if failed or answer is None else str(answer),
    )
