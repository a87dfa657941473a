"""A run as its loop sees it, and the callbacks that it calls: their base class and the arguments of their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rl_core.data.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import Model, Saved
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutPool
from rl_core.weights import Weights

EndStatus = Literal["finished", "interrupted", "failed"]
"""The way a run ended."""

HOOKS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")
"""Methods of `Callback` that a run calls."""


@dataclass(frozen=True)
class CallbackRun:
    """The run that a callback belongs to.

    Args:
        run_dir: Run directory.
        config: Resolved config as nested plain values.
        step: Last complete step; 0 in a new run.
        max_steps: Number of the run's last step.
        history: Metrics of the steps so far, as `metrics.jsonl` has them, with `step`; empty in a new run. A callback
            that counts or compares rebuilds its state from them when a run is resumed.
        stop: Called with a reason, ends the run after the present step, with a checkpoint. The run is then finished.
    """

    run_dir: Path
    config: Mapping[str, Any]
    step: int
    max_steps: int
    history: Sequence[Mapping[str, Any]]
    stop: Callable[[str], None]


@dataclass(frozen=True)
class RunEnd:
    """The end of a run.

    Args:
        status: `finished` if all steps are made or the goal is met, `interrupted` by a signal or a time limit, or
            `failed` with an error. The same command resumes the last two.
        reason: Why it ended; empty if all steps are made.
        step: Last complete step.
        max_steps: Number of the run's last step.
        metrics: Metrics of the last complete step.
    """

    status: EndStatus
    reason: str
    step: int
    max_steps: int
    metrics: Mapping[str, float]


class Callback:
    """Base class of callbacks: override the hooks that you need.

    The process that drives the run makes one instance and calls its hooks between steps, so that the run waits for
    them. The settings of a callback are the fields of a dataclass, or the keyword-only parameters of its constructor.

    Attributes:
        run: The run, set before `on_start` is called.
    """

    run: CallbackRun

    def on_start(self, run: CallbackRun) -> None:
        """Prepare for the first step; called after a resumed run has been restored."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float] | None:
        """Handle the end of a step.

        Returns:
            Metrics to record with the step, under names that it does not have; None for none.
        """

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float] | None:
        """Handle a validation or an evaluation that followed a step, with its metrics (`val/*`, `eval/*`); called
        before `on_step`. The validation before the first step has step 0, and is handled with step 1.

        Returns:
            Metrics to record with the step; None for none.
        """

    def on_save(self, step: int, checkpoint_path: Path) -> None:
        """Handle a complete checkpoint; its Hugging Face files are in the folder `hf`."""

    def on_end(self, state: RunEnd) -> None:
        """Handle the end of the run, whether it finished or failed; called if `on_start` was called."""


class Checkpointable(Protocol):
    """Loop state that a checkpoint holds in addition to the models: a data position, counters."""

    def state(self) -> Mapping[str, Any]:
        """Return plain data (JSON and numpy) that `restore` resumes from."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


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

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside as `time/<name>` and show it as what the run is doing."""

    def record(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Record metrics of a step, each as its result; several calls for one step are merged into one line."""

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

    def record_validation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Write the rollouts of a validation after a step, one line each."""

    def due(self, period: int, step: int, *, at_end: bool = False) -> bool:
        """Return whether something with this period (0 is never) is due after this step; `at_end` adds the last
        step."""

    def stop(self, reason: str) -> None:
        """End after the current step, having saved: the loop has reached its goal."""


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
        judge_usage: Returns the metrics of the language models that judge since the last call.
    """

    models: Mapping[str, Model]
    data: Any
    weights: Weights | None = None
    pool: RolloutPool | None = None
    opponents: Saved | None = None
    evaluation: Any = None
    judge_usage: Callable[[], Mapping[str, float]] | None = None
