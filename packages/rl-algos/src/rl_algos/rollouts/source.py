"""The synchronous source: every group is sampled with the newest weights, on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl_algos.rollouts.failures import FailureWatch
from rl_core.generation import Evaluation, RolloutPool, RolloutTask, SamplingParams, WeightUpdate
from rl_core.rollout import Prompt, RolloutGroup


class PromptStream(Protocol):
    """Prompts in a repeatable order, each once per epoch."""

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; fewer at the end of the last epoch."""
        ...

    def state(self) -> Mapping[str, Any]:
        """The position of the stream."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


class SyncRolloutSource:
    """Rolls out the next prompts of a stream, staleness 0.

    Args:
        pool: runs the rollouts.
        prompts: the prompts to roll out.
        sampling: how completions are drawn.
        num_generations: rollouts per prompt.
        seed: of sampling; a rollout's seed follows from it, from the number of prompts drawn before, and its place in
            the group.
        max_failed_share: share of failed rollouts of one call above which they are refused, as they are if all failed.
        section: config section of that share, named in messages.
    """

    def __init__(
        self,
        pool: RolloutPool,
        prompts: PromptStream,
        *,
        sampling: SamplingParams,
        num_generations: int,
        seed: int,
        max_failed_share: float = 1.0,
        section: str = "",
    ) -> None:
        self._pool = pool
        self._prompts = prompts
        self._sampling = sampling
        self._num_generations = num_generations
        self._failures = FailureWatch(max_failed_share, section=section)
        self._seed = seed
        self._num_drawn = 0
        self._trained = self._position()

    def collect(self, num_groups: int) -> list[RolloutGroup]:
        """The next groups; fewer at the end of the data.

        Raises:
            RolloutsFailed: if too many of their rollouts failed.
        """
        prompts = self._prompts.take(num_groups)
        first, self._num_drawn = self._num_drawn, self._num_drawn + len(prompts)
        tasks = [
            RolloutTask(prompt, self._sampling, _seeds((self._seed, first + i), self._num_generations))
            for i, prompt in enumerate(prompts)
        ]
        return self._run(tasks)

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Roll out given prompts with the current weights; the same prompts always get the same seeds."""
        return Evaluation(
            self._run(evaluation_tasks(prompts, sampling, num_generations=num_generations, seed=self._seed))
        )

    def adopt(self, update: WeightUpdate) -> None:
        """Bring the replicas to this version; the groups collected before it count as trained."""
        self._pool.adopt(update)
        self._trained = self._position()

    def state(self) -> Mapping[str, Any]:
        """Data position and number of prompts drawn, as of the last `adopt`: groups collected since then have trained
        nothing yet and come again."""
        return self._trained

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._prompts.restore(state["prompts"])
        self._num_drawn = state["num_drawn"]
        self._trained = self._position()

    def _run(self, tasks: Sequence[RolloutTask]) -> list[RolloutGroup]:
        tickets = self._pool.submit(tasks)
        done = dict(self._pool.next_done() for _ in tickets)
        groups = [done[ticket] for ticket in tickets]
        self._failures.check(groups)
        return groups

    def _position(self) -> Mapping[str, Any]:
        return {"prompts": self._prompts.state(), "num_drawn": self._num_drawn}

    def close(self) -> None:
        """Do nothing: the source owns no process."""


def evaluation_tasks(
    prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int, seed: int
) -> list[RolloutTask]:
    """The rollouts of an evaluation. The seed of a sample follows from `seed`, the place of its prompt and its place in
    the group, and depends neither on the number of prompts nor on that of samples.
    """
    return [RolloutTask(prompt, sampling, _seeds((seed, i, 1), num_generations)) for i, prompt in enumerate(prompts)]


def _seeds(entropy: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(int(seed) for seed in np.random.SeedSequence(entropy).generate_state(count))
