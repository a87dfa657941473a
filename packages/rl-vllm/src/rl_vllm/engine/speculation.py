"""Speculative decoding of vLLM's engine: its settings, and the counts of its drafts."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from vllm.config import LoadConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
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
    """Counts of the drafts that an engine has verified, from vLLM's own statistics, without tokens past the end of a
    completion: vLLM accepts such tokens and then discards them.
    """

    def __init__(self) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted: list[int] = []
        self._num_past_end = 0
        self._accepted_past_end: Counter[int] = Counter()
        self._received: WeakKeyDictionary[RequestState, tuple[int, int]] = WeakKeyDictionary()
        self._read: list[int] = []

    def read(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of drafts, of their tokens, and of drafts whose first, second, ... token was accepted.

        None of them decreases: statistics of a step and ends of completions arrive one after the other.
        """
        accepted = [count - self._accepted_past_end[place] for place, count in enumerate(self._num_accepted)]
        found = [self._num_drafts, self._num_draft_tokens - self._num_past_end, *accepted]
        self._read = [max(pair) for pair in zip_longest(found, self._read, fillvalue=0)]
        num_drafts, num_tokens, *counts = self._read
        return num_drafts, num_tokens, tuple(counts)

    def see(self, state: RequestState | None, output: EngineCoreOutput) -> None:
        """Follow the tokens that a request gets, until it ends with its statistics."""
        if state is None or not output.new_token_ids:
            return
        steps, tokens = self._received.get(state, (0, 0))
        self._received[state] = received = steps + 1, tokens + len(output.new_token_ids)
        if output.spec_decode_metrics is not None:
            self.cut(output.spec_decode_metrics, *received)

    def cut(self, metrics: RequestSpecDecodeMetrics, num_steps: int, num_tokens: int) -> None:
        """Leave out tokens that were drafted past the end of a completion.

        A step yields the accepted tokens and one more. If a request got fewer in the sum over its steps, the rest was
        discarded from its last step.

        Args:
            metrics: Statistics of the request.
            num_steps: Number of steps that gave it tokens.
            num_tokens: Tokens that it got.
        """
        num_discarded = sum(metrics.per_step_accepted) + num_steps - num_tokens
        if num_discarded <= 0:
            return
        accepted, drafted = metrics.per_step_accepted[-1], metrics.per_step_drafted[-1]
        num_received = accepted + 1 - num_discarded
        self._num_past_end += drafted - num_received
        self._accepted_past_end.update(range(num_received, accepted))

    def take(self, stats: SpecDecodingStats) -> None:
        """Add the statistics of a step."""
        self._num_drafts += stats.num_drafts
        self._num_draft_tokens += stats.num_draft_tokens
        counts = zip_longest(self._num_accepted, stats.num_accepted_tokens_per_pos, fillvalue=0)
        self._num_accepted = [before + count for before, count in counts]

    def follow(self, scheduler: Scheduler) -> None:
        """Add the drafts of a scheduler of this process, which makes no statistics itself."""
        make = scheduler.make_spec_decoding_stats

        def take(stats: SpecDecodingStats | None, *args: Any, **kwargs: Any) -> SpecDecodingStats | None:
            # Without the switch vLLM makes no statistics; if it is on all the time, it makes too many.
            scheduler.log_stats = True
            try:
                found = make(None, *args, **kwargs)
            finally:
                scheduler.log_stats = False
            if found is not None:
                self.take(found)
            return None

        scheduler.make_spec_decoding_stats = take
