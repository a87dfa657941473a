"""Numbers of the tenants over time: a file of lines, and the trackers that the recipe's `logger` enables."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.directory.run_state import Labels
from rl_launch.run_session.directory.served import STATUS, TENANTS
from rl_launch.run_session.tracking.writers import MetricWriters, open_writers

PERIOD_S = 10.0


class TenantRecords:
    """Writes the numbers of the tenants.

    Args:
        folder: Run directory.
        logger: Section `logger` of the recipe, whose trackers get the numbers by the optimizer steps of all tenants.
        settings: The whole config, which trackers store.
    """

    def __init__(self, folder: Path, logger: LoggerConfig, settings: Config) -> None:
        self._folder = folder
        self._step = self._last_step()
        self._open: Callable[[], MetricWriters] = lambda: open_writers(
            logger, folder, settings=settings, after=self._step, labels=Labels()
        )

    def _last_step(self) -> int:
        try:
            lines = (self._folder / TENANTS).read_text(encoding="utf-8").splitlines()
            return int(json.loads(lines[-1])["steps"])
        except (OSError, ValueError, IndexError, KeyError):
            return 0

    async def keep(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Write the numbers periodically, until it is cancelled.

        Args:
            status: Returns the numbers.
        """
        writers = await asyncio.to_thread(self._open)
        try:
            while True:
                await asyncio.to_thread(self._write, writers, status())
                await asyncio.sleep(PERIOD_S)
        finally:
            self._write(writers, status())
            writers.close("interrupted", at_once=True)

    def _write(self, writers: MetricWriters, status: Mapping[str, Any]) -> None:
        new = self._folder / f"{STATUS}.new"
        new.write_text(json.dumps({"time": time.time(), **status}), encoding="utf-8")
        new.replace(self._folder / STATUS)
        steps = sum(numbers["steps"] for numbers in status["tenants"].values())
        if steps == self._step and (self._folder / TENANTS).exists():
            return
        with (self._folder / TENANTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "steps": steps, "tenants": status["tenants"]}) + "\n")
        self._step = steps
        named = {
            f"tenants/{tenant}/{name}": float(value)
            for tenant, numbers in status["tenants"].items()
            for name, value in numbers.items()
        }
        writers.write(steps, named)
