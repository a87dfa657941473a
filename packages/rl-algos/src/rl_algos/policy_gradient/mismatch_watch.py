"""The examination that a run makes by itself when policy and generator disagree."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rl_algos.rollouts.mismatch import (
    CLOSED,
    MIN_CLOSED,
    MISMATCH_KL,
    MismatchFinding,
    MismatchGap,
    TriedChange,
    bounded,
    mean_difference,
    ranked,
)
from rl_core.data.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import LOGPROBS, Loss, Model
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, WEIGHT_VERSIONS
from rl_core.token_filter import TokenFilter

_log = logging.getLogger(__name__)

NUM_ROWS = 8
"""Number of rows that are examined."""

PERIOD = 50
"""Number of steps from one examination to the next while the mismatch stays large."""

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5)
FILTERS: tuple[tuple[str, Any], ...] = (
    *(("top_p", value) for value in (0.8, 0.9, 0.95, 0.99)),
    *(("top_k", value) for value in (20, 50)),
    ("min_p", 0.05),
)
"""Settings that are tried on the rows."""


class MismatchWatch:
    """Notes a large mismatch after a step and examines it on a few rows of the next, with the policy as it is then,
    which has the weights that sampled these rows unless the run is asynchronous.

    Only what needs no other model is tried: temperature, filters, the age of the rows, the weights of the reference.
    `rl doctor mismatch` tries the rest.
    """

    def __init__(self) -> None:
        self._steps_until = 0
        self._kl: float | None = None
        self._found: dict[str, float] = {}

    def observe(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Take the metrics of a step's updates; return metrics of the step's examination, if there was one."""
        found, self._found = self._found, {}
        metric = metrics.get("mismatch/kl")
        self._kl = None if metric is None else metric.result()
        self._steps_until = max(self._steps_until - 1, 0) if self.is_large else 0
        return found

    @property
    def is_large(self) -> bool:
        """True if the last step's mismatch was large."""
        return self._kl is not None and not self._kl <= MISMATCH_KL

    def state(self) -> dict[str, Any]:
        """Return the state, empty if there is nothing to remember."""
        return {"kl": self._kl, "steps_until": self._steps_until} if self.is_large else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._kl, self._steps_until = state.get("kl"), state.get("steps_until", 0)

    def examine(self, batch: Batch, policy: Model, loss: Loss) -> None:
        """Examine rows of a step before the policy learns from them, if that is due.

        Args:
            batch: Rows of the step.
            policy: Policy that has not learned from them.
            loss: Loss of the step, with the temperature and the filter of the policy's passes.
        """
        if not self.is_large or self._steps_until or GENERATION_LOGPROBS not in batch:
            return
        self._steps_until = PERIOD
        findings = _findings(batch, policy, loss)
        self._found = {f"{CLOSED}{each.cause}": each.closed for each in findings if each.closed > 0}
        first = findings[0] if findings else None
        found = "no sampling setting explains it; `rl doctor mismatch RUN` tries the model's settings"
        if first is not None and first.closed >= MIN_CLOSED:
            found = f"{first.closed:.0%} of it is explained by {first.title}: {first.detail}. {first.remedy}"
        _log.warning("mismatch/kl is %.3g, so %d rows have been examined: %s", self._kl, NUM_ROWS, found)


def _findings(batch: Batch, policy: Model, loss: Loss) -> tuple[MismatchFinding, ...]:
    lengths = batch.ragged(LOSS_MASK).lengths
    # The rows are of all parts of the batch; short ones cost least.
    chosen = np.argsort(lengths, kind="stable")[np.linspace(0, len(lengths) // 2, NUM_ROWS).astype(int)]
    rows = batch.select(np.unique(chosen)).local()
    is_sampled = rows.ragged(LOSS_MASK).values > 0
    if not is_sampled.any():
        return ()

    def sampled(name: str, source: Batch = rows) -> np.ndarray:
        return source.ragged(name).values[is_sampled].astype(np.float64)

    def scored(temperature: float, kept: TokenFilter | None) -> np.ndarray:
        return sampled("logprobs", policy.infer(rows, [replace(LOGPROBS, token_filter=kept)], temperature=temperature))

    token_filter = next((read.token_filter for read in loss.reads), None)
    generation, own = sampled(GENERATION_LOGPROBS), scored(loss.temperature, token_filter)
    mean = mean_difference(own, generation)
    gap = MismatchGap(mean, float(bounded(np.abs(own - generation)).max()), 1.0, len(own), mean, None)
    tried: list[tuple[str, str, float]] = []
    if "ref_logprobs" in rows:
        left = mean_difference(sampled("ref_logprobs"), generation)
        tried.append(("stale", "the weights of the reference, which the run began with", left))
    if WEIGHT_VERSIONS in rows:
        versions = sampled(WEIGHT_VERSIONS)
        newest = versions == versions.max()
        if not newest.all():
            # The gap of tokens of the same weights is what would be left if none were older.
            left = mean_difference(own[newest], generation[newest])
            tried.append(("age", f"{(~newest).mean():.0%} of the tokens are of older weights", left))
    for temperature in TEMPERATURES:
        if temperature != loss.temperature:
            left = mean_difference(scored(temperature, token_filter), generation)
            tried.append(("temperature", f"temperature {temperature:g} instead of {loss.temperature:g}", left))
    if token_filter is None or not token_filter.allowed:
        for cause, value in (("filter", None), *FILTERS):
            kept = None if value is None else TokenFilter(**{cause: value})
            if kept != token_filter:
                left = mean_difference(scored(loss.temperature, kept), generation)
                tried.append((cause, "no filter" if value is None else f"{cause}={value:g}", left))
    return ranked(gap, [TriedChange(cause, detail, "generator", left) for cause, detail, left in tried])
