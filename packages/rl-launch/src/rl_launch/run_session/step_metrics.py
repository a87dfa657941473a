"""The metrics of a run's steps, on their way from the loop to the files and trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.metrics import Metric, results
from rl_launch.run_session.config import CheckpointingConfig
from rl_launch.run_session.directory.run_state import BestSoFar
from rl_launch.run_session.rollouts.run_files import MetricsFile
from rl_launch.run_session.tracking.writers import MetricWriters

_logger = logging.getLogger(__name__)


class StepMetrics:
    """Collects the metrics of steps, and writes a line for each step that is complete.

    Args:
        path: Path of `metrics.jsonl`.
        ranking: The metric that ranks checkpoints; its best value is kept.
        with_step: Takes the metrics of a step before they are written, and returns them with further ones.

    Attributes:
        file: The file of metrics.
        writers: Writers that all later steps are given to, too.
        best: The best value so far.
        last: Metrics of the last step that was written.
    """

    def __init__(
        self,
        path: Path,
        ranking: CheckpointingConfig,
        *,
        with_step: Callable[[int, Mapping[str, float]], Mapping[str, float]],
    ) -> None:
        self.file = MetricsFile(path)
        self._ranking = ranking
        self._with_step = with_step
        self.writers = MetricWriters()
        self._pending: dict[int, dict[str, float]] = {}
        self.best = self._new_best()
        self._is_unranked_noted = False
        self.last: Mapping[str, float] = {}

    def resume_after(self, step: int) -> list[dict[str, Any]]:
        """Remove the lines of later steps; returns the others.

        Args:
            step: The last complete step; 0 removes all lines, including a validation before the first step.
        """
        self.file.cut_back(step or -1)
        history = self.file.read()
        self.best = self._new_best()
        for row in history:
            self.best.add(row["step"], row)
        return history

    def record(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Merge metrics into the metrics of a step."""
        self._pending.setdefault(step, {}).update(results(metrics))

    def recorded(self, step: int) -> Mapping[str, float]:
        """Return the metrics of a step that is not written yet."""
        return self._pending.get(step, {})

    def write_until(self, step: int) -> None:
        """Write the lines of this step and of earlier ones, in order."""
        for number in sorted(each for each in self._pending if each <= step):
            metrics: Mapping[str, float] = self._pending.pop(number)
            odd = sorted(name for name, value in metrics.items() if not np.isfinite(value))
            if odd:
                _logger.warning("step %d: not a finite number: %s", number, ", ".join(odd))
            key = self._ranking.metric_key
            validated = [name for name in metrics if name.startswith("val/")]
            is_ranked = key is None or not key.startswith("val/") or not validated or key in metrics
            if not is_ranked and not self._is_unranked_noted:
                self._is_unranked_noted = True
                _logger.warning(
                    "checkpointing.metric_name: validation does not record %s, so the newest checkpoints are kept; it "
                    "has %s",
                    key,
                    ", ".join(validated),
                )
            metrics = self._with_step(number, metrics)
            self.file.append(number, metrics)
            self.writers.write(number, metrics)
            self.best.add(number, metrics)
            self.last = metrics

    def _new_best(self) -> BestSoFar:
        return BestSoFar(self._ranking.metric_key, higher_is_better=self._ranking.higher_is_better)
