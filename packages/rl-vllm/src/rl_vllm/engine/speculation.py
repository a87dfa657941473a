"""Speculative decoding of vLLM's engine: its settings, and the counts of its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import LoadConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from rl_vllm.config import SpeculationConfig


def speculative_config(speculation: SpeculationConfig | None) -> dict[str, Any] | None:
    """Return vLLM's settings of speculative decoding; None if it is off.

    A drafter is loaded from its files also if the weights of the policy are sent. It proposes its most likely tokens:
    tokens that it draws would not follow from a request's seed.
    """
    if speculation is None:
        return None
    found: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.num_tokens}
    if speculation.model is not None:
        folder = str(Path(speculation.model).expanduser())
        return found | {"model": folder, "draft_load_config": LoadConfig(), "draft_sample_method": "greedy"}
    smallest, largest = speculation.lookup
    return found | {"prompt_lookup_min": smallest, "prompt_lookup_max": largest}


class DraftCounts:
    """Counts of the drafts that an engine has verified, from vLLM's own statistics.

    Attributes:
        num_drafts: Drafts.
        num_draft_tokens: Their tokens.
        num_accepted: Drafts whose first, second, ... token was accepted.
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted: list[int] = []

    def take(self, stats: SpecDecodingStats) -> None:
        """Add the statistics of a step."""
        self.num_drafts += stats.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted += [0] * (len(stats.num_accepted_tokens_per_pos) - len(self.num_accepted))
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            self.num_accepted[position] += count

    def follow(self, scheduler: Scheduler) -> None:
        """Add the drafts of a scheduler of this process, which makes no statistics of its own."""
        make = scheduler.make_spec_decoding_stats

        def take(stats: SpecDecodingStats | None, *args: Any, **kwargs: Any) -> SpecDecodingStats | None:
            # of one request; without the switch vLLM makes none, with it for all that the scheduler does
            scheduler.log_stats = True
            try:
                found = make(None, *args, **kwargs)
            finally:
                scheduler.log_stats = False
            if found is not None:
                self.take(found)
            return None

        scheduler.make_spec_decoding_stats = take
