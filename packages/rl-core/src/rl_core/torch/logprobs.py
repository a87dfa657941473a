"""Logprobs, entropy and the most likely tokens straight from hidden states, without logits for all tokens at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the product of hidden states and head: `softcap * tanh(scale * x / softcap)`, or `scale *
    x`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        scaled = products * self.scale if self.scale != 1.0 else products
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient by the products, from the gradient by the logits and the logits."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        return grad * self.scale if self.scale != 1.0 else grad


@dataclass(frozen=True)
class Head:
    """A language-model head.

    Args:
        weight: `[vocab, hidden]`.
        bias: `[vocab]`.
        transform: from products to logits.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform = LogitTransform()


class TokenReads(NamedTuple):
    """Results per position, float32 (float64 from float64 hidden states).

    `logprobs` `[n]`; `entropy` `[n]`, empty unless asked for; `topk_logprobs` and int64 `topk_ids` `[n, k]`. All but
    the ids are differentiable.
    """

    logprobs: Tensor
    entropy: Tensor
    topk_logprobs: Tensor
    topk_ids: Tensor


def head_reads(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    k: int = 0,
    chunk_size: int = 1024,
) -> TokenReads:
    """What the head says at each position; at most `[chunk_size, vocab]` logits exist, in the forward and in the
    backward pass.

    The backward pass computes each chunk's logits again. Reductions are in float32 whatever the dtype of the hidden
    states.

    Args:
        hidden: `[n, hidden]`.
        head: its weight has the dtype of the hidden states.
        targets: int64 `[n]`, the token whose logprob is wanted.
        temperature: divides the logits.
        entropy: whether to return it, in nats.
        k: number of most likely tokens to return, in falling order.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if k > len(head.weight):
        raise ValueError(f"topk({k}) of a vocabulary of {len(head.weight)} tokens")
    options = _Options(head.transform, temperature, entropy, k, chunk_size)
    return TokenReads(*_HeadReads.apply(hidden, head.weight, head.bias, targets, options))


@dataclass(frozen=True)
class _Options:
    transform: LogitTransform
    temperature: float
    entropy: bool
    k: int
    chunk_size: int

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits before the temperature, in float32 or wider."""
        products = F.linear(hidden, weight, bias)
        return self.transform(products.to(_wide(products.dtype)))

    def chunks(self, num: int) -> Iterator[slice]:
        for start in range(0, num, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _HeadReads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num, wide = len(hidden), _wide(hidden.dtype)
        logprobs = hidden.new_empty(num, dtype=wide)
        entropy = hidden.new_empty(num if options.entropy else 0, dtype=wide)
        topk_logprobs = hidden.new_empty((num, options.k), dtype=wide)
        topk_ids = targets.new_empty((num, options.k))
        for chunk in options.chunks(num):
            logits = options.logits(hidden[chunk], weight, bias)
            all_logprobs = (logits / options.temperature).log_softmax(-1)
            logprobs[chunk] = all_logprobs.gather(1, targets[chunk, None])[:, 0]
            if options.k:
                topk_logprobs[chunk], topk_ids[chunk] = all_logprobs.topk(options.k)
            if options.entropy:
                entropy[chunk] = -(all_logprobs.exp() * all_logprobs).sum(-1)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, topk_ids)
        ctx.mark_non_differentiable(topk_ids)
        return logprobs, entropy, topk_logprobs, topk_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, topk_ids = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for chunk in ctx.options.chunks(len(hidden)):
            logits = ctx.options.logits(hidden[chunk], weight, bias)
            chunk_grads = tuple(grad[chunk] for grad in grads[:3])
            chunk_targets = torch.cat([targets[chunk, None], topk_ids[chunk]], dim=1)
            grad = _grad_products(ctx.options, logits, chunk_targets, entropy[chunk], chunk_grads)
            narrow = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[chunk]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _grad_products(
    options: _Options, logits: Tensor, targets: Tensor, entropy: Tensor, grads: tuple[Tensor, ...]
) -> Tensor:
    """Gradient `[n, vocab]` by the products of hidden states and head.

    With p the probabilities: d logp_t / d z = onehot(t) - p, and d H / d z = -p (log p + H).

    Args:
        targets: `[n, 1 + k]`, the target and the top-k tokens.
        entropy: `[n]`, or empty.
        grads: by the logprobs `[n]`, the entropy `[n]` or empty, the top-k logprobs `[n, k]`.
    """
    by_logprobs, by_entropy, by_topk = grads
    all_logprobs = (logits / options.temperature).log_softmax(-1)
    by_targets = torch.cat([by_logprobs[:, None], by_topk], dim=1)
    coefficient = -by_targets.sum(1, keepdim=True)
    probabilities = all_logprobs.exp()
    if options.entropy:
        grad = probabilities * (coefficient - by_entropy[:, None] * (all_logprobs + entropy[:, None]))
    else:
        grad = probabilities.mul_(coefficient)
    grad.scatter_add_(1, targets, by_targets)
    return options.transform.backward(grad.div_(options.temperature), logits)
