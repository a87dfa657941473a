"""Logprobs, entropy and the most likely tokens from a head whose vocabulary is split over ranks; logits never meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.torch.logprobs import Head, LogitTransform, TokenReads


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head that one rank holds.

    Args:
        start: token id of the first of them.
        vocab_size: tokens of the whole head; rows that stand for ids beyond it are padding and count for nothing.
        group: the ranks that hold the whole head between them.
    """

    start: int
    vocab_size: int
    group: dist.ProcessGroup

    def trim(self, rows: Tensor) -> Tensor:
        """The rows (weight or bias) that are no padding; there may be none."""
        return rows[: max(0, min(len(rows), self.vocab_size - self.start))]


def vocab_parallel_reads(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    k: int = 0,
    chunk_size: int = 1024,
    sums_hidden_grad: bool = True,
) -> TokenReads:
    """As `rl_core.torch.logprobs.head_reads`, from this rank's rows of the head; collective over the shard's group.

    At most `[chunk_size, vocab / ranks]` logits exist on a rank. Per chunk, three numbers per position are summed over
    the group (and `2 k` gathered for top-k); the backward pass talks once, about the hidden states.

    Args:
        hidden: `[n, hidden]`, the same on every rank of the group.
        head: weight `[vocab / ranks, hidden]` and bias of this rank.
        targets: int64 `[n]`, token ids of the whole vocabulary.
        sums_hidden_grad: whether the gradient by the hidden states is summed over the group here; otherwise it is this
            rank's part of that sum, for a caller that sums it itself (a reduce-scatter under sequence parallelism).

    Returns:
        The same values on every rank. The loss must be computed alike on every rank too.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if k > shard.vocab_size:
        raise ValueError(f"topk({k}) of a vocabulary of {shard.vocab_size} tokens")
    weight = shard.trim(head.weight)
    bias = None if head.bias is None else shard.trim(head.bias)
    options = _Options(shard, head.transform, temperature, entropy, k, chunk_size, sums_hidden_grad)
    return TokenReads(*_VocabParallelReads.apply(hidden, weight, bias, targets, options))


@dataclass(frozen=True)
class _Options:
    shard: VocabShard
    transform: LogitTransform
    temperature: float
    entropy: bool
    k: int
    chunk_size: int
    sums_hidden_grad: bool

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's columns before the temperature, in float32 or wider."""
        products = F.linear(hidden, weight, bias)
        return self.transform(products.to(_wide(products.dtype)))

    def own(self, ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Columns of token ids on this rank (any column where it is another's), and whether they are here."""
        columns = ids - self.shard.start
        is_here = (columns >= 0) & (columns < num_rows)
        return columns.clamp(0, max(num_rows - 1, 0)), is_here

    def chunks(self, num: int) -> Iterator[slice]:
        for start in range(0, num, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _VocabParallelReads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num, wide = len(hidden), _wide(hidden.dtype)
        logprobs = hidden.new_empty(num, dtype=wide)
        log_sums = hidden.new_empty(num, dtype=wide)
        entropy = hidden.new_empty(num if options.entropy else 0, dtype=wide)
        topk_logprobs = hidden.new_empty((num, options.k), dtype=wide)
        topk_ids = targets.new_empty((num, options.k))
        for chunk in options.chunks(num):
            logits = options.logits(hidden[chunk], weight, bias) / options.temperature
            found = _statistics(logits, targets[chunk], options)
            log_sums[chunk] = found.log_sum
            logprobs[chunk] = found.target - found.log_sum
            if options.entropy:
                entropy[chunk] = found.entropy
            if options.k:
                values, topk_ids[chunk] = _topk(logits, options)
                topk_logprobs[chunk] = values - found.log_sum[:, None]
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, topk_ids)
        ctx.mark_non_differentiable(topk_ids)
        return logprobs, entropy, topk_logprobs, topk_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropy, topk_ids = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for chunk in ctx.options.chunks(len(hidden)):
            logits = ctx.options.logits(hidden[chunk], weight, bias)
            chunk_targets = torch.cat([targets[chunk, None], topk_ids[chunk]], dim=1)
            chunk_grads = tuple(grad[chunk] for grad in grads[:3])
            grad = _grad_products(ctx.options, logits, chunk_targets, log_sums[chunk], entropy[chunk], chunk_grads)
            narrow = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[chunk]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        if grad_hidden is not None and ctx.options.sums_hidden_grad:
            dist.all_reduce(grad_hidden, group=ctx.options.shard.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


@dataclass(frozen=True)
class _Statistics:
    """Of the whole vocabulary's logits, each `[n]`."""

    log_sum: Tensor
    target: Tensor
    entropy: Tensor


def _statistics(logits: Tensor, targets: Tensor, options: _Options) -> _Statistics:
    """With m the largest logit and S the sum of exp(z - m): log sum = m + log S, H = log S - sum exp(z - m)(z - m) / S.

    Args:
        logits: `[n, rows]` of this rank.
    """
    group, num_rows = options.shard.group, logits.shape[1]
    largest = logits.new_full((len(logits),), -torch.inf) if num_rows == 0 else logits.amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[:, None]
    weights = shifted.exp()
    sums = logits.new_zeros(3, len(logits))
    sums[0] = weights.sum(1)
    if num_rows:
        columns, is_here = options.own(targets, num_rows)
        sums[1] = shifted.gather(1, columns[:, None])[:, 0].where(is_here, sums.new_zeros(()))
    if options.entropy:
        sums[2] = (weights * shifted).sum(1)
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    return _Statistics(largest + log_sum, largest + sums[1], log_sum - sums[2] / sums[0])


def _topk(logits: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """The largest logits `[n, k]` of the whole vocabulary in falling order, and their ids."""
    group, k = options.shard.group, options.k
    values = logits.new_full((len(logits), k), -torch.inf)
    ids = torch.zeros((len(logits), k), dtype=torch.int64, device=logits.device)
    here = min(k, logits.shape[1])
    if here:
        values[:, :here], found = logits.topk(here)
        ids[:, :here] = found + options.shard.start
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    all_ids = [torch.empty_like(ids) for _ in all_values]
    dist.all_gather(all_values, values, group=group)
    dist.all_gather(all_ids, ids, group=group)
    best, place = torch.cat(all_values, 1).topk(k)
    return best, torch.cat(all_ids, 1).gather(1, place)


def _grad_products(
    options: _Options,
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grads: tuple[Tensor, ...],
) -> Tensor:
    """Gradient `[n, rows]` by this rank's products of hidden states and head.

    With p the probabilities: d logp_t / d z = onehot(t) - p, and d H / d z = -p (log p + H).

    Args:
        targets: `[n, 1 + k]`, the target and the top-k tokens.
        entropy: `[n]`, or empty.
        grads: by the logprobs `[n]`, the entropy `[n]` or empty, the top-k logprobs `[n, k]`.
    """
    by_logprobs, by_entropy, by_topk = grads
    logprobs = logits / options.temperature - log_sum[:, None]
    by_targets = torch.cat([by_logprobs[:, None], by_topk], dim=1)
    grad = logprobs.exp()
    coefficient = -by_targets.sum(1, keepdim=True)
    if options.entropy:
        coefficient = coefficient - by_entropy[:, None] * (logprobs + entropy[:, None])
    grad = grad * coefficient
    if logits.shape[1]:
        columns, is_here = options.own(targets, logits.shape[1])
        grad.scatter_add_(1, columns, by_targets.where(is_here, by_targets.new_zeros(())))
    return options.transform.backward(grad.div_(options.temperature), logits)
