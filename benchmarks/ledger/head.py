"""Costs of a language-model head."""

from __future__ import annotations

import torch

from ledger.counter import CostCounter
from ledger.step import PassCosts
from rl_core.torch.heads.logprobs import Head, head_reads


def head_costs(
    hidden_size: int,
    vocab_size: int,
    num_tokens: int,
    *,
    chunk_size: int,
    entropy: bool = False,
    temperature: float = 1.0,
) -> PassCosts:
    """Return the costs of the logprobs of tokens, in bfloat16, and of their gradients by hidden states and head.

    Args:
        hidden_size: Features of a hidden state.
        vocab_size: Rows of the head.
        num_tokens: Number of tokens.
        chunk_size: Tokens whose logits exist at one time.
        entropy: True to read it too.
        temperature: Divides the logits.
    """
    hidden, weight = (
        torch.empty(count, hidden_size, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for count in (num_tokens, vocab_size)
    )
    targets = torch.empty(num_tokens, device="meta", dtype=torch.int64)
    with CostCounter() as counter:
        reads = head_reads(
            hidden, Head(weight), targets, temperature=temperature, entropy=entropy, chunk_size=chunk_size
        )
        forward, kept = counter.costs, counter.live_bytes
        outs = [reads.logprobs, *([reads.entropy] if entropy else [])]
        torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])
    return PassCosts(forward, counter.costs, kept)
