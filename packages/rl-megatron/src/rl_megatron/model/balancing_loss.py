"""The loss that spreads tokens evenly over experts."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def balancing_loss(
    scores: Tensor,
    routing_map: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    topk: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the sum over segments of `tokens x loss`, or this rank's part of it; the loss of a segment is 1 if its
    tokens are spread evenly.

    `loss = experts / (k tokens^2) sum over experts of (tokens sent there) (sum of its scores)`. A segment is a
    microbatch in the loss of Switch Transformers (https://arxiv.org/abs/2101.03961), a row in that of DeepSeek-V3
    (https://arxiv.org/abs/2412.19437, section 2.1.2). Weighed by tokens, a sum over microbatches divided by all tokens
    is a mean.

    Args:
        scores: `[tokens, experts]`, normalised.
        routing_map: Bool `[tokens, experts]`, the `topk` of each token.
        segments: Int64 `[tokens]`, from 1; 0 for tokens that do not count.
        num_segments: Number of segments.
        topk: Number of experts per token.
        group: Ranks that have the other tokens of the same segments; None if this rank has all.
    """
    num_experts = scores.shape[1]
    zeros = scores.new_zeros(num_segments + 1, num_experts)
    sent = zeros.index_add(0, segments, routing_map.to(scores.dtype))
    sums = zeros.index_add(0, segments, scores)
    if group is not None and group.size() > 1:
        dist.all_reduce(sent, group=group)
    sent, sums = sent[1:], sums[1:]
    num_tokens = sent.sum(1, keepdim=True) / topk
    return (sent * sums * (num_experts / (topk * num_tokens.clamp(min=1)))).sum()
