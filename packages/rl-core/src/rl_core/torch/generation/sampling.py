"""Drawing tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_core.rollouts.generation import SamplingParams
from rl_core.token_filter import TokenFilter


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return float64 `[count]` in [0, 1), with which a request of this seed draws, whatever requests are decoded with
    it."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128)).random(count)


def draw(logits: Tensor, sampling: Sequence[SamplingParams], uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return one token per row and its processed logprob.

    A row of temperature 0 takes the most likely token; its logprob is that at temperature 1, unfiltered.

    Args:
        logits: `[rows, vocab]`.
        sampling: Sampling parameters of each row.
        uniform: Per row, the number in [0, 1) that picks from the cumulative distribution.

    Returns:
        int64 `[rows]` and float32 `[rows]`.
    """
    logprobs = processed_logprobs(logits, sampling)
    greedy = torch.tensor([params.temperature == 0 for params in sampling], device=logits.device)
    # float64, so that the last bits of the logits, which depend on the batch, hardly ever move a token
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    threshold = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * total
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def processed_logprobs(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Return float32 `[rows, vocab]`, logprobs after temperature, min-p, top-k and top-p, in this order; -inf for
    tokens filtered out."""
    temperature = _column([params.temperature or 1.0 for params in sampling], logits)
    scaled = logits.float() / temperature
    filters = [
        TokenFilter(params.top_k, params.top_p, params.min_p) if params.temperature > 0 else TokenFilter()
        for params in sampling
    ]
    if not all(each.keeps_all for each in filters):
        scaled = _filter(scaled, filters)
    return scaled.log_softmax(dim=-1)


def _filter(scaled: Tensor, filters: Sequence[TokenFilter]) -> Tensor:
    """Return -inf on what the filters leave out; tokens that tie with the k-th stay, the most likely token always does."""
    vocab = scaled.shape[-1]
    top_k = [min(each.top_k or vocab, vocab) for each in filters]
    top_p = _column([each.top_p for each in filters], scaled)
    if any(each.min_p for each in filters):
        min_p = _column([each.min_p for each in filters], scaled)
        scaled = scaled.masked_fill(scaled < scaled.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
    ascending, order = scaled.sort(dim=-1, stable=True)
    last = torch.tensor([[vocab - k] for k in top_k], device=scaled.device)
    ascending = ascending.masked_fill(ascending < ascending.gather(1, last), -torch.inf)
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    outside = (below <= 1 - top_p) & (top_p < 1)
    outside[:, -1] = False
    ascending = ascending.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ascending)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
