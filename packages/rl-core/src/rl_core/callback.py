"""User code that a run calls during training: the base class of callbacks, and the arguments of their hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
