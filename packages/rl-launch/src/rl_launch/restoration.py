"""Going on from the newest checkpoint after a model worker has died."""

from __future__ import annotations

import logging
from typing import Protocol

from rl_core.errors import WorkerDied
from rl_launch.topology import POLICY

_log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Deaths without a new checkpoint between them, after which the run fails: it would die there again."""


class Session(Protocol):
    """What is asked of a run session."""

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 before there is one."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether steps could be made."""
        ...


class Restoration:
    """Decides whether a run is started again.

    Args:
        saves: whether the run saves checkpoints; without them there is nothing to go on from.
    """

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves
        self._num_deaths = 0
        self._saved = -1
        self.goes_on = False

    def judge(self, error: WorkerDied, session: Session) -> None:
        """Set `goes_on`, and say so in the log: a rank of the policy died in a step, and not always at the same one."""
        self._num_deaths = 1 if session.saved > self._saved else self._num_deaths + 1
        self._saved = session.saved
        is_policy = error.origin is not None and error.origin.role == POLICY
        self.goes_on = self._saves and is_policy and session.has_begun and self._num_deaths < MOST_DEATHS
        if self.goes_on:
            where = f"checkpoint step_{session.saved}" if session.saved else "the beginning, as nothing was saved yet"
            _log.warning("%s; starting again from %s", error, where)
