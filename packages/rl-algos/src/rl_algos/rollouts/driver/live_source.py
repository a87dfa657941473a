"""Rollouts of users' conversations, and the trial of a weight version before users are answered with it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_algos.rollouts.config import CanaryConfig
from rl_algos.rollouts.driver.draw import DrawState
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_core.errors import DataChanged, RolloutsFailed, WeightSyncError
from rl_core.model import Saved, SavedFile
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt
from rl_core.tracing import spans
from rl_core.weights import Weights, WeightUpdate

_log = logging.getLogger(__name__)

USERS = "users"
"""Dataset of the prompts that are places in the order of users' conversations."""

NO_REWARD = "no reward was posted before the deadline"
NO_TEXT = "its text was deleted before it was trained on"
TOO_OLD = "older weights sampled it than max_trajectory_age_steps allows"
TAKEN_BACK = "the weights that it trained were taken back"
"""Reasons why a conversation trains nothing."""

TRIED, SERVED, REFUSED = "tried", "served", "taken back"
"""Verdicts about a weight version."""

_NO_TOKENS = np.zeros(0, np.int32)


class UserPrompts:
    """The stream of a run that learns from its users: prompt number k is the k-th place in the order of conversations.

    Attributes:
        datasets: None; nothing is loaded.
    """

    datasets: tuple[Sequence[Prompt], ...] = ()
    num_left = None

    def __init__(self) -> None:
        self._num_drawn = 0

    def take(self, count: int) -> list[Prompt]:
        """Return the next places."""
        first, self._num_drawn = self._num_drawn, self._num_drawn + count
        numbers = range(first, self._num_drawn)
        return [Prompt(f"{USERS}/{k}", (), _NO_TOKENS, "", dataset=USERS, place=f"conversation {k}") for k in numbers]

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {USERS: self._num_drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            DataChanged: If it is a position in a dataset.
        """
        self.check(state)
        self._num_drawn = state[USERS]

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a `DataChanged` if a position is not one of such a stream."""
        if USERS not in state:
            raise DataChanged("the data has changed since the checkpoint: it was a dataset, and users begin now")


class UserPool(Protocol):
    """A `rl_core.rollouts.pool.RolloutPool` whose rollout program serves users."""

    def call_program(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the program in every rollout worker, and return the answers of those that are alive."""


class LiveSource(PacedRolloutSource):
    """Rolls out places of users' conversations. Those that cannot train are set aside, and others take their part.

    It takes the arguments of `PacedRolloutSource`; its pool also has the methods of `UserPool`.
    """

    _tried: int | None = None

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """Return the next groups with a reward whose weights are young enough; waits until there are so many."""
        kept: list[RolloutGroup] = []
        while len(kept) < num_groups:
            for group in self._collected(num_groups - len(kept), num_later):
                if reason := self._untrained(group):
                    self.set_aside([group], reason)
                else:
                    kept.append(group)
        self._check(kept)
        return kept

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of `PacedRolloutSource`, and the number of conversations by their state."""
        counts: list[Mapping[str, int]] = self.program("counts")
        own = {f"live/{name}": float(count) for name, count in counts[0].items()} if counts else {}
        if counts:
            own["live/left_out"] = float(max(each["left_out"] for each in counts))
        return {**super().metrics(), **own}

    def program(self, method: str, *args: Any) -> list[Any]:
        """See `UserPool.call_program`."""
        found: list[Any] = self._pool.call_program(method, *args)  # type: ignore[attr-defined]
        return found

    def try_version(self, update: WeightUpdate) -> None:
        """Bring the replicas to a version that users are not answered with yet. `adopt` of the same version ends that,
        and so does `adopt` of a later one, after `take_back`."""
        self.program("set_verdict", update.version, TRIED)
        self._tried = update.version
        super()._deliver(update)

    def take_back(self, version: int, score: float) -> None:
        """Note that users are never answered with a version that was tried, and that it trained nothing."""
        self.program("set_verdict", version, REFUSED, score)
        for draw in self._in(DrawState.COLLECTED):
            draw.set_aside(TAKEN_BACK)

    def _deliver(self, update: WeightUpdate) -> None:
        self.program("set_verdict", update.version, SERVED)
        if update.version != self._tried:
            super()._deliver(update)

    def _untrained(self, group: RolloutGroup) -> str:
        """Return why a group trains nothing; empty if it can."""
        if failures := {failure for failure in group.rollouts.failure if failure in (NO_REWARD, NO_TEXT)}:
            return next(iter(failures))
        versions = [version for spans_of_one in group.rollouts.spans for version, _ in spans_of_one]
        return TOO_OLD if versions and self._version - min(versions) > self._max_staleness else ""


@dataclass(eq=False)
class ServingCanary:
    """Tries a weight version on prompts that are held out before users are answered with it, and takes it back if it
    is worse than the version that they have.

    The policy's state with the served version is kept in a folder. A version that is taken back leaves no trace but the
    numbers that are recorded: the policy continues with the served version, published again under a new number.

    Args:
        settings: Bound of the decrease.
        source: Source of the rollouts.
        policy: The policy.
        weights: Publishes its weights.
        prompts: Prompts that are held out, each with its environment.
        sampling: How their completions are drawn.
    """

    settings: CanaryConfig
    source: LiveSource
    policy: Saved
    weights: Weights
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    score: float | None = None
    _kept: tuple[str, tuple[SavedFile, ...]] = ("", ())

    def begin(self) -> None:
        """Score the version that users are served as a run begins or resumes, and keep it."""
        if self.score is None:
            self.score = self._scored()
        self._keep()

    def serve(self, update: WeightUpdate) -> tuple[WeightUpdate, Mapping[str, float]]:
        """Bring a version to users, or take it back.

        Returns:
            The version that they are served from here on, and metrics of the trial.
        """
        assert self.score is not None, "not begun"
        before = self.score
        try:
            self.source.try_version(update)
            score, failure = self._scored(), ""
        except (RolloutsFailed, WeightSyncError) as error:
            score, failure = -np.inf, str(error)
        is_worse = not score >= before - self.settings.max_drop
        recorded = {"canary/taken_back": float(is_worse), "canary/served_reward": before}
        if np.isfinite(score):
            recorded["canary/reward"] = score
        if not is_worse:
            self.source.adopt(update)
            self.score = score
            self._keep()
            spans.mark("weights", f"users are served version {update.version}")
            _log.info("users are served weight version %d: reward %.4g, before %.4g", update.version, score, before)
            return update, recorded
        why = (
            failure or f"its reward on held-out prompts is {score:.4g}, and that of the version before is {before:.4g}"
        )
        self.source.take_back(update.version, score if np.isfinite(score) else 0.0)
        path, files = self._kept
        self.policy.load(path, files=files)
        again = self.weights.publish()
        self.source.adopt(again)
        spans.mark("weights", f"version {update.version} is taken back")
        _log.warning(
            "weight version %d is taken back: %s. Users keep the weights that they have, and training continues from "
            "them as version %d; lower the learning rate if that repeats",
            *(update.version, why, again.version),
        )
        return again, recorded

    def state(self) -> Mapping[str, Any]:
        """Return the reward of the version that is served."""
        return {"score": self.score}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Compare with the version of a checkpoint."""
        self.score = state["score"]

    def _scored(self) -> float:
        return float(self.source.evaluate(self.prompts, self.sampling).rewards.mean())

    def _keep(self) -> None:
        """Keep the policy's state. The state before is removed only when the new one is complete."""
        before = self._kept[0]
        (folder, *_) = self.source.program("folder")
        path = Path(folder, "served_b" if before.endswith("_a") else "served_a")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self.policy.save(str(path), wait=True)
        files = self.policy.finish_save(wait=True)
        assert files is not None, "the save was waited for"
        self._kept = str(path), files
        if before:
            shutil.rmtree(before, ignore_errors=True)
