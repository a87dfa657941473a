"""The summary of an evaluation, from scores of prompts and reasons of failures: for `rl eval` and for validation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from rl_algos.evaluation.estimates import Estimate, bootstrap_mean, consensus_at_k, pass_at_k
from rl_core.rollouts.group import RolloutGroup

ANSWER = "answer"
"""Entry of an environment's `info` that holds the answer which it found in a completion."""

MAX_REASONS = 5
"""Reasons listed in a message, the commonest first."""

_REASON_LENGTH = 160
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


class SampleScore(NamedTuple):
    """One sample of a prompt.

    Args:
        reward: The environment's; 0 for a failed rollout.
        status: Status of a rollout: `ok`, `truncated` (it ran into a limit of tokens or turns) or `failed`.
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
        """Return the scores of a group. Answers, which only its records hold, are left out."""
        rewards = np.nan_to_num(group.rewards()).tolist()
        rows = zip(rewards, group.rollouts.status, group.rollouts.failure, group.rollouts.num_sampled, strict=True)
        return cls(group.prompt.id, group.prompt.dataset, [SampleScore(*row) for row in rows])

    @classmethod
    def of_records(cls, records: Sequence[Mapping[str, Any]]) -> PromptScore:
        """Return the scores of the records of a group, in any order."""
        ordered = sorted(records, key=lambda record: record["index"])
        samples = []
        for record in ordered:
            failed = record["status"] == "failed"
            reward = 0.0 if failed else float(np.nan_to_num(record["rewards"].get("reward", 0.0)))
            answer = None if failed else record["info"].get(ANSWER)
            answer = None if answer is None else str(answer)
            samples.append(SampleScore(reward, record["status"], record["failure"], record["num_sampled"], answer))
        return cls(ordered[0]["prompt_id"], ordered[0]["dataset"], samples)

    @classmethod
    def refused(cls, prompt_id: str, dataset: str, reason: str, num_samples: int) -> PromptScore:
        """Return the scores of a prompt that could not be given to the model: every sample fails."""
        return cls(prompt_id, dataset, [SampleScore(0.0, "failed", reason)] * num_samples)

    @property
    def mean(self) -> float:
        """Mean reward of the samples; a failed one earns 0."""
        return float(np.array([sample.reward for sample in self.samples]).mean())

    def num_passed(self, threshold: float) -> int:
        """Count samples whose reward is at least the threshold; a failed one never passes."""
        return sum(sample.status != "failed" and sample.reward >= threshold for sample in self.samples)


@dataclass(frozen=True)
class Scoring:
    """The estimates of an evaluation.

    Args:
        k: Sizes of pass@k and cons@k; sizes above the number of samples are left out.
        pass_threshold: Minimum reward of a sample that passes.
        confidence: Confidence of the intervals.
        seed: Seed of the resamples of the intervals.
    """

    k: tuple[int, ...] = ()
    pass_threshold: float = 1.0
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Summary:
    """The results of one task. Every prompt and every sample counts: a failed one scores 0.

    Args:
        num_prompts: Number of prompts of the task.
        num_rollouts: Samples of all prompts.
        num_failed: Samples that failed: the environment raised or hung, or the engine refused the prompt.
        num_truncated: Samples that ran into a limit of tokens or turns; they are scored as far as they came.
        mean_length: Tokens sampled per sample.
        estimates: Estimates by name: `mean`, `pass@k` and `cons@k`. cons@k needs an environment that reports answers.
        by_dataset: Mean by the name of the dataset; empty if there is one.
        failures: Number of failed samples by reason.
    """

    num_prompts: int
    num_rollouts: int
    num_failed: int
    num_truncated: int
    mean_length: float
    estimates: Mapping[str, Estimate]
    by_dataset: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean reward over all prompts."""
        return self.estimates["mean"].value


def summarize(scores: Sequence[PromptScore], scoring: Scoring) -> Summary:
    """Return the summary of a task.

    Args:
        scores: Scores of every prompt; each has equally many samples.
        scoring: The estimates to make.
    """
    samples = [sample for score in scores for sample in score.samples]
    statuses = [sample.status for sample in samples]
    estimates = {
        name: bootstrap_mean(values, confidence=scoring.confidence, seed=scoring.seed)
        for name, values in values_by_name(scores, scoring).items()
    }
    return Summary(
        num_prompts=len(scores),
        num_rollouts=len(samples),
        num_failed=statuses.count("failed"),
        num_truncated=statuses.count("truncated"),
        mean_length=mean_length(scores),
        estimates=estimates,
        by_dataset=means_by_dataset(scores),
        failures=reason_counts([sample.failure for sample in samples if sample.status == "failed"]),
    )


def values_by_name(scores: Sequence[PromptScore], scoring: Scoring) -> dict[str, np.ndarray]:
    """Return float64 `[prompts]` of every estimate, by its name."""
    num_samples = len(scores[0].samples)
    sizes = [k for k in scoring.k if k <= num_samples]
    values = {"mean": means(scores)}
    for k in sizes:
        passed = [score.num_passed(scoring.pass_threshold) for score in scores]
        values[f"pass@{k}"] = np.array([pass_at_k(num_samples, number, k) for number in passed])
    answers = [([each.answer for each in score.samples], [each.reward for each in score.samples]) for score in scores]
    if any(answer is not None for given, _ in answers for answer in given):
        # With one sample, cons@1 would be the mean of the samples with an answer.
        for k in sizes:
            if k > 1:
                values[f"cons@{k}"] = np.array([consensus_at_k(*each, k) for each in answers])
    return values


def means(scores: Sequence[PromptScore]) -> np.ndarray:
    """Return float64 `[prompts]`, mean reward of each prompt."""
    return np.array([score.mean for score in scores])


def mean_length(scores: Sequence[PromptScore]) -> float:
    """Return the tokens sampled per sample."""
    return float(np.mean([sample.num_sampled for score in scores for sample in score.samples]))


def means_by_dataset(scores: Sequence[PromptScore]) -> dict[str, float]:
    """Return the mean reward by the name of the dataset, sorted; empty if there is only one."""
    rewards = means(scores)
    datasets = np.array([score.dataset for score in scores])
    names = np.unique(datasets)
    return {str(name): float(rewards[datasets == name].mean()) for name in names} if len(names) > 1 else {}


def powers_of_two(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, up to a number: the usual k of pass@k."""
    k = 1
    while k <= most:
        yield k
        k *= 2


def reason_counts(failures: Sequence[str]) -> dict[str, int]:
    """Return the number of failures by their cause, the commonest first, with the reason of the first failure."""
    counts = Counter(map(cause_of, failures))
    examples = {cause_of(failure): _reason(failure) for failure in reversed(failures)}
    return {examples[cause]: count for cause, count in counts.most_common()}


def listed(counts: Mapping[str, int]) -> str:
    """Return reasons with their numbers, as messages have them."""
    shown = "; ".join(f"{count} x {reason}" for reason, count in islice(counts.items(), MAX_REASONS))
    others = f"; and {len(counts) - MAX_REASONS} other reasons" if len(counts) > MAX_REASONS else ""
    return f"{shown}{others}"


def cause_of(failure: str) -> str:
    """Return the reason without the values in it: failures that differ only in these have one cause."""
    return _VARIES.sub("", _reason(failure))


def _reason(failure: str) -> str:
    return failure.splitlines()[0][:_REASON_LENGTH] if failure else ""
