"""Compaction of a conversation that becomes long: a summary takes the place of its turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rl_algos.rollouts.worker.programs import POLICY
from rl_core.rollouts.rollout import Message

REQUEST = (
    "Summarise the conversation. Your summary takes the place of all turns so far; only the first request and the next "
    "answer to you remain. Include everything that you need to continue."
)


class Compaction(NamedTuple):
    """When and how the conversation of an agent is compacted.

    Args:
        at: Number of tokens from which a conversation is compacted before a turn; None for as many as leave room for a
            turn and its summary.
        summary_tokens: Maximum number of tokens of a summary, or of the turns that are kept; None for as many as a turn
            may have.
        summariser: `policy`, `recent`, or the name of an agent that is an opponent.
        request: Text that asks for a summary.
    """

    at: int | None = None
    summary_tokens: int | None = None
    summariser: str = POLICY
    request: str = REQUEST

    def asked_after(self, observation: Sequence[Message]) -> list[Message]:
        """Return the request in the place of an observation, with its roles and ids, so that every chat template that
        renders the observation renders the request."""
        texts = ["" for _ in observation[1:]] + [self.request]
        return [{**message, "content": text} for message, text in zip(observation, texts, strict=True)]


def compaction_info(sizes: Sequence[tuple[int, int]]) -> Mapping[str, float]:
    """Return the entries of `Rollout.info` for compactions, from the numbers of tokens before and after each."""
    if not sizes:
        return {"compaction/count": 0.0}
    before, after = map(fmean, zip(*sizes, strict=True))
    return {"compaction/count": float(len(sizes)), "compaction/tokens_before": before, "compaction/tokens_after": after}


def recent_turns(
    turns: Sequence[Message], max_tokens: int, num_tokens: Callable[[Sequence[Message]], int]
) -> Sequence[Message]:
    """Return the newest turns of a conversation within a number of tokens, at least the last turn of the policy.

    Args:
        turns: Messages after the first request; the last is the newest turn of the policy.
        max_tokens: Maximum number of tokens.
        num_tokens: Function from such messages to their number of tokens.
    """
    starts = [place for place, message in enumerate(turns) if message["role"] == "assistant"]
    fitting = (turns[start:] for start in starts[:-1] if num_tokens(turns[start:]) <= max_tokens)
    return next(fitting, turns[starts[-1] :])
