"""The tokens that a filter keeps of the distribution at each position, whole or split over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rl_core.token_filter import TokenFilter

LEFT_OUT = -1e30
"""Logit of a token that is filtered out: its probability is 0, and products with it stay finite."""

FIRST_CANDIDATES = 256
"""Most likely tokens that top-p looks at first; where they do not hold enough, it looks at more."""


class Vocabulary(Protocol):
    """Logits `[n, columns]` of a vocabulary, of which this rank may hold a part."""

    @property
    def size(self) -> int:
        """Tokens of the whole vocabulary."""
        ...

    def largest(self, logits: Tensor, k: int) -> Tensor:
        """`[n, k]`, the largest logits of the whole vocabulary in descending order; collective."""
        ...

    def summed(self, values: Tensor) -> Tensor:
        """The sum of each rank's values; collective."""
        ...


@dataclass(frozen=True)
class WholeVocabulary:
    """A vocabulary whose logits this rank has all of."""

    size: int

    def largest(self, logits: Tensor, k: int) -> Tensor:
        """See `Vocabulary.largest`."""
        return logits.topk(k).values

    def summed(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values


@torch.no_grad()
def lowest_kept(logits: Tensor, token_filter: TokenFilter, vocabulary: Vocabulary) -> Tensor:
    """`[n, 1]`, the smallest logit that the filter keeps at each position, exactly: tokens with the same logit as the
    last that is kept are kept too.

    Top-p sorts as many candidates as hold enough, the same number on every rank.

    Args:
        logits: `[n, columns]`, over the temperature.
        token_filter: Top-k, top-p and min-p limits.
        vocabulary: The vocabulary of the columns, which reduces over the ranks that share it.
    """
    largest = vocabulary.largest(logits, 1)
    lowest = torch.full_like(largest, -torch.inf)
    if token_filter.min_p > 0:
        lowest = largest + math.log(token_filter.min_p)
    if 0 < token_filter.top_k < vocabulary.size:
        lowest = torch.maximum(lowest, vocabulary.largest(logits, token_filter.top_k)[:, -1:])
    if token_filter.top_p < 1:
        num_candidates = token_filter.top_k or FIRST_CANDIDATES
        lowest = _lowest_of_nucleus(logits, lowest, largest, token_filter.top_p, vocabulary, num_candidates)
    return lowest


def leave_out_(logits: Tensor, lowest: Tensor, columns: Tensor, is_here: Tensor | None = None) -> Tensor:
    """Give the logits below the lowest that is kept a probability of 0, except one of each row that stays; in place.

    Args:
        logits: `[n, columns]`.
        lowest: `[n, 1]`.
        columns: Int64 `[n, 1]`, of the token that was sampled: the engine that drew it may have rounded otherwise.
        is_here: Bool `[n, 1]`, whether this rank has the column; None if it has all.
    """
    if not logits.shape[1]:
        return logits
    sampled = logits.gather(1, columns)
    logits.masked_fill_(logits < lowest, LEFT_OUT)
    if is_here is not None:
        sampled = sampled.where(is_here, logits.gather(1, columns))
    return logits.scatter_(1, columns, sampled)


def _lowest_of_nucleus(
    logits: Tensor, lowest: Tensor, largest: Tensor, top_p: float, vocabulary: Vocabulary, num_candidates: int
) -> Tensor:
    """A token is kept if those that are more likely hold less than `top_p` of what is kept before."""
    wanted = top_p * vocabulary.summed(_weights(logits, lowest, largest).sum(1, dtype=torch.float64))[:, None]
    while True:
        num_candidates = min(num_candidates, vocabulary.size)
        candidates = vocabulary.largest(logits, num_candidates)
        held = _weights(candidates, lowest, largest).double()
        up_to = held.cumsum(1)
        if num_candidates == vocabulary.size or bool((up_to[:, -1:] >= wanted).all()):
            break
        num_candidates *= 8
    is_kept = up_to - held < wanted
    return candidates.where(is_kept, torch.inf).amin(1, keepdim=True).maximum(lowest)


def _weights(logits: Tensor, lowest: Tensor, largest: Tensor) -> Tensor:
    """Probabilities over that of the most likely token; 0 below the lowest."""
    return (logits - largest).exp_().masked_fill_(logits < lowest, 0.0)
