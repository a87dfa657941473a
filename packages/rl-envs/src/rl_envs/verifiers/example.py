"""A taskset of sums, for the recipe `verifiers-tiny`: one task for each pair of numbers, and a reward for its sum."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum.

    Attributes:
        answer: The right answer.
    """

    answer: str


class SumTask(vf.Task[SumData]):
    """One turn: the sum, and nothing else."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right answer, otherwise 0."""
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Count the characters of the answer."""
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    max_operand: int = 49
    """Largest number."""


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """All sums of two numbers up to the largest, in a fixed random order."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        numbers = range(self.config.max_operand + 1)
        pairs = [(a, b) for a in numbers for b in numbers]
        random.Random(0).shuffle(pairs)
        for a, b in pairs:
            yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
