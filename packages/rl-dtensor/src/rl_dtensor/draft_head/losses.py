"""Cross-entropy of a head from the distributions of its policy, without logits for all tokens at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_core.torch.heads.logprobs import CHUNK_SIZE, Head


@dataclass(frozen=True)
class PolicyHead:
    """The distributions that a head learns.

    Args:
        head: Output layer of the policy, whole.
        draft_ids: Int64 `[draft vocabulary]`, the token of each output of the draft head; None if they are the same.
    """

    head: Head
    draft_ids: Tensor | None

    @torch.no_grad()
    def probabilities(self, hidden: Tensor) -> Tensor:
        """Probabilities of the tokens that can be drafted, float32 `[n, draft vocabulary]`; those of a reduced
        vocabulary do not sum to 1.

        Args:
            hidden: `[n, hidden]`, after the policy's last norm.
        """
        products = F.linear(hidden.to(self.head.weight.dtype), self.head.weight, self.head.bias)
        found = self.head.transform(_wide(products)).softmax(-1)
        return found if self.draft_ids is None else found[:, self.draft_ids]


def cross_entropy(
    hidden: Tensor, weight: Tensor, policy_hidden: Tensor, policy: PolicyHead, *, chunk_size: int | None = None
) -> Tensor:
    """Cross-entropy of the head's distribution from the policy's at each position, float32 `[n]`; differentiable by the
    hidden states and the weight of the head.

    At most `[chunk_size, vocabulary]` logits of each exist; the backward pass computes them again.

    Args:
        hidden: `[n, hidden]`, after the head's last norm.
        weight: `[draft vocabulary, hidden]`, output layer of the head.
        policy_hidden: `[n, policy hidden]`, after the policy's last norm.
        policy: Distributions of the policy.
        chunk_size: Number of positions whose logits exist at one time; None for the default.
    """

    def chunk(hidden: Tensor, weight: Tensor, policy_hidden: Tensor) -> Tensor:
        logprobs = _wide(F.linear(hidden, weight)).log_softmax(-1)
        return -(policy.probabilities(policy_hidden) * logprobs).sum(-1)

    size = chunk_size or CHUNK_SIZE
    parts = [
        checkpoint(chunk, own, weight, others, use_reentrant=False)
        for own, others in zip(hidden.split(size), policy_hidden.split(size), strict=True)
    ]
    return torch.cat(parts)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
