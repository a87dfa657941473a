"""The run session, as a loop sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_core.data.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import Model, Saved
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutPool
from rl_core.weights import Weights


class Checkpointable(Protocol):
    """Loop state that a checkpoint holds in addition to the models: a data position, counters."""

    def state(self) -> Mapping[str, Any]:
        """Return plain data (JSON and numpy) that `restore` resumes from."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        ...


class Run(Protocol):
    """Timing, logging, progress and checkpoints of one run, so that a loop does not implement them.

    The usage loop::

        steps = run.steps(max_steps, models={"policy": policy}, state={"rollouts": rollouts})
        rollouts.adopt(weights.publish())
        for step in steps:
            with run.phase("generation"):
                groups = rollouts.collect(n)
            run.record(step, metrics)
    """

    def steps(
        self, max_steps: int, *, models: Mapping[str, Saved], state: Mapping[str, Checkpointable]
    ) -> Iterator[int]:
        """Yield the steps still to do, counted from 1. The call restores the newest checkpoint; asking for the next
        step saves one if it is due.

        Ends early when asked to (a signal, a time limit, `stop`), having saved.
        """
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside as `time/<name>` and show it as what the run is doing."""
        ...

    def record(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Record metrics of a step, each as its result; several calls for one step are merged into one line."""
        ...

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, batch: Batch | None = None
    ) -> None:
        """Write a step's rollouts, one line each, during the steps that follow.

        Args:
            step: Number of the step.
            groups: Groups of the step; those that were not trained on come last.
            advantages: `[rollouts]`, in the order of the groups and within them.
            batch: Rows of the groups that were trained on, in the same order; the values of each token are
                recorded: `loss_mask` and, if it has them, `prev_logprobs`, `prev_entropy` and `advantages`. None to
                record no tokens.
        """
        ...

    def record_validation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Write the rollouts of a validation after a step, one line each."""
        ...

    def due(self, period: int, step: int, *, at_end: bool = False) -> bool:
        """Return whether something with this period (0 is never) is due after this step; `at_end` adds the last
        step."""
        ...

    def stop(self, reason: str) -> None:
        """End after the current step, having saved: the loop has reached its goal."""
        ...


@dataclass(frozen=True)
class Components:
    """The objects that an algorithm uses; those that it does not need are None.

    Args:
        models: Models by role, as in the algorithm's plugin.
        data: Result of the algorithm's `prepare`.
        weights: Publishes the policy's weights.
        pool: Runs rollouts.
        opponents: Older weights of the policy that play against it, as a checkpoint holds them.
        evaluation: Result of `plan` of the algorithm's `evaluation`, if the run is evaluated as it trains.
    """

    models: Mapping[str, Model]
    data: Any
    weights: Weights | None = None
    pool: RolloutPool | None = None
    opponents: Saved | None = None
    evaluation: Any = None
