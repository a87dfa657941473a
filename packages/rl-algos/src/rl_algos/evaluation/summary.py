"""The summary of an evaluation: one for `rl eval` and for validation in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_algos.evaluation.estimates import consensus_at_k, pass_at_k
from rl_algos.evaluation.intervals import Estimate, bootstrap_mean
from rl_algos.evaluation.reasons import reason_counts
from rl_algos.evaluation.scores import PromptScore


@dataclass(frozen=True)
class Scoring:
    """The estimates of an evaluation.

    Args:
        k: Sizes of pass@k and cons@k; those above the number of samples are left out.
        pass_threshold: Least reward of a sample that passes.
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
        estimates: by name: `mean`, then `pass@k` and `cons@k`. cons@k needs an environment that reports answers.
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
    """The summary of a task.

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
    """float64 `[prompts]` of every estimate, by its name."""
    num_samples = len(scores[0].samples)
    sizes = [k for k in scoring.k if k <= num_samples]
    values = {"mean": means(scores)}
    for k in sizes:
        passed = [score.num_passed(scoring.pass_threshold) for score in scores]
        values[f"pass@{k}"] = np.array([pass_at_k(num_samples, number, k) for number in passed])
    # of one sample it is the mean of those with an answer, which says nothing more
    for k in sizes if any(score.reports_answers for score in scores) else ():
        if k > 1:
            values[f"cons@{k}"] = np.array([_consensus(score, k) for score in scores])
    return values


def means(scores: Sequence[PromptScore]) -> np.ndarray:
    """float64 `[prompts]`, mean reward of each prompt."""
    return np.array([score.mean for score in scores])


def mean_length(scores: Sequence[PromptScore]) -> float:
    """Tokens sampled per sample."""
    return float(np.mean([sample.num_sampled for score in scores for sample in score.samples]))


def means_by_dataset(scores: Sequence[PromptScore]) -> dict[str, float]:
    """Mean reward by the name of the dataset, sorted; empty if there is only one."""
    rewards = means(scores)
    datasets = np.array([score.dataset for score in scores])
    names = np.unique(datasets)
    return {str(name): float(rewards[datasets == name].mean()) for name in names} if len(names) > 1 else {}


def powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, up to a number: the usual k of pass@k."""
    k = 1
    while k <= most:
        yield k
        k *= 2


def _consensus(score: PromptScore, k: int) -> float:
    return consensus_at_k([s.answer for s in score.samples], [s.reward for s in score.samples], k)
