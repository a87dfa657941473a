"""Restarts of environments' processes, which only the logs of their own processes hold, in the log of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import ray
from ray.actor import ActorHandle

from rl_core.errors import Origin, RLError
from rl_core.ray.calls import fetch, wait
from rl_core.tracing import spans
from rl_launch.session.traces.step_trace import RESTARTS

_log = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Time from one question to the next."""

SILENCE_S = 30.0
"""How much longer than its deadline an environment's host may leave a question unanswered, which needs no work."""

FINISH_S = 2.0
"""Maximum wait for the last answers."""


class EnvironmentWatch:
    """Asks environments now and then how often their processes were restarted, and warns of further restarts.

    A host that does not answer is killed, for example because it is stopped. Ray starts it again, and with it the calls
    that wait for it.

    Args:
        actors: Processes that hold an `rl_core.environments.pool.EnvironmentPool`, by the environment's label.
        logs: Log of each.
        deadlines: The `deadline_s` of each.
        clock: Seconds.
    """

    def __init__(
        self,
        actors: Mapping[str, ActorHandle],
        logs: Mapping[str, str],
        deadlines: Mapping[str, float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._logs = logs
        self._deadlines = deadlines
        self._clock = clock
        self._asked: dict[str, ray.ObjectRef] = {}
        self._asked_at = clock()
        self._told = dict.fromkeys(actors, 0)
        self._killed: set[str] = set()

    @property
    def actors(self) -> dict[str, ActorHandle]:
        """The actors, by the names of their logs."""
        return {Path(self._logs[label]).stem: actor for label, actor in self._actors.items()}

    def check(self) -> None:
        """Ask, or read the answers that are there; never waits."""
        for label, ref in list(self._asked.items()):
            if wait([ref], 0):
                self._read(label, self._asked.pop(label))
        now = self._clock()
        for label in self._asked.keys() - self._killed:
            if now - self._asked_at > self._deadlines[label] + SILENCE_S:
                self._kill(label)
        if not self._asked and now - self._asked_at >= PERIOD_S:
            self._ask()
            self._asked_at = now

    def finish(self) -> None:
        """Ask a last time, and wait briefly for the answers."""
        end = self._clock() + FINISH_S
        self._ask()
        for label, ref in self._asked.items():
            self._read(label, ref, max(0.0, end - self._clock()))
        self._asked = {}

    def _kill(self, label: str) -> None:
        # it may take long to start again, so it is not killed twice for one question
        self._killed.add(label)
        _log.warning(
            "environment %s: its host has not answered for %g s, %g more than its deadline_s; it is killed and started "
            "again",
            label,
            self._deadlines[label] + SILENCE_S,
            SILENCE_S,
        )
        ray.kill(self._actors[label], no_restart=False)

    def _ask(self) -> None:
        self._killed.clear()
        self._asked = {label: actor.call.remote("health") for label, actor in self._actors.items()}

    def _read(self, label: str, ref: ray.ObjectRef, timeout_s: float | None = None) -> None:
        try:
            health = fetch(ref, Origin(f"environment {label}", 0, "its node", "health"), timeout_s)
        except RLError as error:
            # the rollouts that need it fail, and say so
            _log.debug("%s", error)
            return
        # a process that was started anew counts from 0
        told = self._told[label] if health["num_restarts"] >= self._told[label] else 0
        self._told[label] = health["num_restarts"]
        if health["num_restarts"] > told:
            spans.mark(RESTARTS, f"environment {label}: {health['num_restarts'] - told} process(es) restarted")
            _log.warning(
                "environment %s: %d restart(s) of its processes, %d so far, the last because %s. More: %s",
                label,
                health["num_restarts"] - told,
                health["num_restarts"],
                health["restart_reason"],
                self._logs[label],
            )
