"""The decision that replicas have died too often, so that the run fails."""

from __future__ import annotations

from rl_core.errors import GeneratorError, RLError, WorkerDied, WorkerStalled

MAX_DEATHS = 5
"""Maximum number of deaths of replicas in a row, without a finished group between them, before the run fails."""


class RestartBudget:
    """Counts deaths of replicas, and raises the cause when there are too many."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last = ""
        self._has_finished_any = False

    def reset(self) -> None:
        """Note that a group was finished."""
        self._in_a_row = 0
        self._has_finished_any = True

    def spend(self, error: RLError) -> None:
        """Count a death, or several at once.

        Raises:
            RLError: The error, if an engine has died twice in this way before it finished anything, if a process does
                not start at all, or after too many deaths in a row.
        """
        self._in_a_row += 1
        cause, self._last = self._last, _cause(error)
        if isinstance(error, WorkerStalled) and error.origin is not None and error.origin.phase == "start":
            raise error
        if isinstance(error, GeneratorError) and not self._has_finished_any and cause == self._last:
            raise error
        if self._in_a_row < MAX_DEATHS:
            return
        said = f"replicas died {self._in_a_row} times in a row without finishing a group; the last time: "
        if isinstance(error, WorkerDied):
            raise type(error)(f"{said}{error.args[0]}", error.origin)
        raise GeneratorError(f"{said}{error}")


def _cause(error: RLError) -> str:
    """The text without the origin: several replicas die of the same cause."""
    return str(error).split(": ", 1)[-1]
