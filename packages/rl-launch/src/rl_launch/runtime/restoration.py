"""Restart of a run from its newest checkpoint after it has lost a worker or a node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_core.errors import ConfigError, DataError, RLError, WorkerDied
from rl_core.tracing import spans
from rl_launch.placement.bundles import DevicesLost, PlacementError
from rl_launch.run_session.guardrails import GuardrailRestart
from rl_launch.run_session.traces.step_trace import RESTARTS

if TYPE_CHECKING:
    from rl_launch.run_session.session import RunSession

_log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Number of deaths without a new checkpoint between them that ends the run: it would die there again."""

ROLLOUT_WORKER = "rollout worker"
"""Role of workers that are replaced during the run. Only repeated deaths end the run."""


class Restoration:
    """Decides whether a run is started again.

    Args:
        saves: True if the run saves checkpoints. Without them it cannot be resumed.
    """

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves
        self._num_deaths = 0
        self._saved = -1
        self._cause = ""
        self.goes_on = False

    @property
    def follows_a_loss(self) -> bool:
        """True if the run has been started again."""
        return bool(self._cause)

    @contextmanager
    def judging(self, session: RunSession, lost_nodes: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Return a context that judges an error that ends it, and raises it again. For the arguments, see `judge`."""
        try:
            yield
        except RLError as error:
            self.judge(error, session, lost_nodes)
            raise

    def judge(self, error: RLError, session: RunSession, lost_nodes: Callable[[], Sequence[str]]) -> None:
        """Set `goes_on` if the run has started once and lost a process that it cannot replace, unless it always dies at
        the same step. The log has a warning then.

        Args:
            error: The error that ends the run.
            session: The session of the run.
            lost_nodes: Returns the addresses of the run's lost nodes. If there are any, they are the cause.
        """
        self.goes_on = isinstance(error, GuardrailRestart)
        if self.goes_on:
            return
        # A run that is restored may lose another node before its first step.
        has_begun = session.has_begun or self.follows_a_loss
        if not (self._saves and has_begun) or isinstance(error, ConfigError | DataError | DevicesLost):
            return
        lost = lost_nodes()
        # Rollout workers are replaced during the run.
        is_death = isinstance(error, WorkerDied) and (error.origin is None or error.origin.role != ROLLOUT_WORKER)
        if not lost and not is_death:
            return
        self._num_deaths = 1 if session.saved > self._saved else self._num_deaths + 1
        self._saved = session.saved
        self.goes_on = self._num_deaths < MAX_DEATHS
        if self.goes_on:
            where = (
                f"checkpoint step_{session.saved}" if session.saved else "the beginning, because nothing was saved yet"
            )
            text = " ".join(str(error).split())
            self._cause = f"node {', '.join(lost)} was lost ({text})" if lost else text
            _log.warning("%s; restarting from %s", self._cause, where)
            spans.mark(RESTARTS, f"the run restarts from {where}")

    def failed(self, error: PlacementError) -> RLError:
        """Return the error of a run that cannot be placed. After a loss it begins with the loss."""
        if not self.follows_a_loss:
            return error
        return DevicesLost(
            f"{self._cause}; the run could not be restored: {error} Run the same command to resume it when the "
            "cluster has the devices."
        )
