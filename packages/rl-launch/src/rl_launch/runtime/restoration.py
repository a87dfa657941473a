"""Going on from the newest checkpoint after a worker or a node was lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rl_core.errors import ConfigError, DataError, RLError, WorkerDied
from rl_core.tracing import spans
from rl_launch.placement.bundles import DevicesLost, PlacementError
from rl_launch.session.traces.step_trace import RESTARTS

_log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Deaths without a new checkpoint between them, after which the run fails: it would die there again."""

ROLLOUT_WORKER = "rollout worker"
"""Role of workers that are replaced during the run. Only repeated deaths end the run."""


class Session(Protocol):
    """The part of a run session that restoration reads."""

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 before there is one."""
        ...

    @property
    def has_begun(self) -> bool:
        """True if steps could be made."""
        ...


class Restoration:
    """Decides whether a run is started again.

    Args:
        saves: True if the run saves checkpoints; without them there is nothing to resume from.
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
    def judging(self, session: Session, lost_nodes: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Judge an error that ends the block, which is raised all the same; arguments as for `judge`."""
        try:
            yield
        except RLError as error:
            self.judge(error, session, lost_nodes)
            raise

    def judge(self, error: RLError, session: Session, lost_nodes: Callable[[], Sequence[str]]) -> None:
        """Set `goes_on` if a process died that nothing else replaces, after the first start of the run and not always
        at the same step; the log says so.

        Args:
            error: The error that ends the run.
            session: The session of the run.
            lost_nodes: Addresses of the run's nodes that are lost; if there are any, they are the cause.
        """
        self.goes_on = False
        # a run that is being restored may lose another node before its first step
        has_begun = session.has_begun or self.follows_a_loss
        if not (self._saves and has_begun) or isinstance(error, ConfigError | DataError | DevicesLost):
            return
        lost = lost_nodes()
        if not lost and not _is_final_death(error):
            return
        self._num_deaths = 1 if session.saved > self._saved else self._num_deaths + 1
        self._saved = session.saved
        self.goes_on = self._num_deaths < MOST_DEATHS
        if self.goes_on:
            where = (
                f"checkpoint step_{session.saved}" if session.saved else "the beginning, because nothing was saved yet"
            )
            text = " ".join(str(error).split())
            self._cause = f"node {', '.join(lost)} was lost ({text})" if lost else text
            _log.warning("%s; restarting from %s", self._cause, where)
            spans.mark(RESTARTS, f"the run restarts from {where}")

    def failed(self, error: PlacementError) -> RLError:
        """The error of a run that cannot be placed; after a loss it names the loss first."""
        if not self.follows_a_loss:
            return error
        return DevicesLost(
            f"{self._cause}; the run could not be restored: {error} Run the same command to resume it when the "
            "cluster has the devices."
        )


def _is_final_death(error: RLError) -> bool:
    """Return whether a process that nothing replaces has died."""
    return isinstance(error, WorkerDied) and (error.origin is None or error.origin.role != ROLLOUT_WORKER)
