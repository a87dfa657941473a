"""The load of an engine in its own processes, from the statistics that its scheduler sends with every step."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats


class Load:
    """The newest load of an engine, as entries of `Generator.health`."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}

    def logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The logger that an engine reports to; a factory for vLLM."""
        return _LoadLogger(self)

    def take(self, stats: SchedulerStats) -> None:
        """Take the statistics of a step in."""
        self.newest["num_running"] = stats.num_running_reqs
        self.newest["num_waiting"] = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.newest["kv_cache_usage"] = stats.kv_cache_usage
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            self._count("num_draft_tokens", drafts.num_draft_tokens)
            self._count("num_accepted_tokens", drafts.num_accepted_tokens)

    def _count(self, name: str, more: int) -> None:
        self.newest[name] = self.newest.get(name, 0) + more


class _LoadLogger(StatLoggerBase):
    def __init__(self, load: Load) -> None:
        self._load = load

    def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            self._load.take(scheduler_stats)

    def log_engine_initialized(self) -> None:
        pass
