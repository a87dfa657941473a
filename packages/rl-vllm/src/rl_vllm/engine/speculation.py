"""Speculative decoding of vLLM's engine: its settings, and the counts of its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import LoadConfig
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

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
    """Counts of the drafts that an engine has verified, without tokens past the end of a completion: vLLM accepts such
    tokens and then discards them.

    Args:
        num_tokens: Maximum number of tokens of a draft.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_drafts = self._num_draft_tokens = 0
        self._num_accepted = [0] * num_tokens

    def read(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of drafts, of their tokens, and of drafts whose first, second, ... token was accepted."""
        return self._num_drafts, self._num_draft_tokens, tuple(self._num_accepted)

    def take(self, num_drafted: int, num_accepted: int) -> None:
        """Add a draft.

        Args:
            num_drafted: Its tokens.
            num_accepted: The first of them that the model accepted.
        """
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for place in range(num_accepted):
            self._num_accepted[place] += 1

    def cut(self, metrics: RequestSpecDecodeMetrics, num_steps: int, num_tokens: int) -> None:
        """Leave out tokens that were drafted past the end of a completion, in the step that took its last draft.

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
        self._num_draft_tokens -= drafted - num_received
        for place in range(num_received, accepted):
            self._num_accepted[place] -= 1
