"""Rows that cannot be used: they end the run, or are left out and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rl_algos.data.config import OnFault
from rl_algos.data.encoding import Failure
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

_SHOWN = 3
"""Rows that are named by their place, with the reason."""


def with_section(message: str, section: str) -> str:
    """Return a message about a row with the section whose keys it names; as it is if it names none.

    Args:
        message: Message with the names of keys in backticks.
        section: Section of the dataset, such as `data.train`.
    """
    names_keys = any(f"`{key}`" in message for key in ("input_key", "output_key", "columns"))
    return f"{message} (as {section}.KEY=VALUE)" if names_keys else message


class LeftOut:
    """Counts rows of a dataset that cannot be used.

    Args:
        name: Name of the dataset.
        malformed: True if such a row ends the run.
        num_rows: Rows that there are.
    """

    def __init__(self, name: str, malformed: OnFault, num_rows: int) -> None:
        self._name = name
        self._malformed = malformed
        self._num_rows = num_rows
        self._first: list[str] = []
        self.count = 0

    def found(self, value: Any, place: Callable[[], str]) -> bool:
        """Return whether a row's value is a failure, and count it.

        Raises:
            DataError: with the row's place, if a failure ends the run.
        """
        if not isinstance(value, Failure):
            return False
        self.count += 1
        if self.count <= _SHOWN:
            self._first.append(f"{place()}: {value.reason}")
        if self._malformed == "error":
            raise DataError(self._first[0])
        return True

    def report(self) -> None:
        """Log how many rows were left out, and the first of them; raises a `DataError` if none is left."""
        if not self.count:
            return
        if self.count == self._num_rows:
            raise DataError(
                f"all {self.count} rows of the dataset {self._name!r} are malformed, the first {self._first[0]}"
            )
        more = f"\n  ... and {self.count - _SHOWN} more" if self.count > _SHOWN else ""
        _log.warning(
            "%s: %d of %d rows are malformed; they are excluded (data.malformed: skip)\n  %s%s",
            self._name,
            self.count,
            self._num_rows,
            "\n  ".join(self._first),
            more,
        )
