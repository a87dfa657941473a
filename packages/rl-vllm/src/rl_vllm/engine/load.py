"""The load and the drafts of an engine in its own processes, from the statistics that its scheduler sends."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from rl_vllm.engine.speculation import DraftCounts


class Load:
    """What an engine reports of its steps.

    Attributes:
        newest: The newest load, as entries of `Generator.health`.
        drafts: Counts of speculative decoding.
    """

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.drafts = DraftCounts()

    def logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The logger that an engine reports to; a factory for vLLM."""
        return _LoadLogger(self)

    def take(self, stats: SchedulerStats) -> None:
        """Take the statistics of a step in."""
        self.newest["num_running"] = stats.num_running_reqs
        self.newest["num_waiting"] = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.newest["kv_cache_usage"] = stats.kv_cache_usage
        if stats.spec_decoding_stats is not None:
            self.drafts.take(stats.spec_decoding_stats)


class _LoadLogger(StatLoggerBase):
    def __init__(self, load: Load) -> None:
        self._load = load

    def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            self._load.take(scheduler_stats)

    def log_engine_initialized(self) -> None:
        pass
