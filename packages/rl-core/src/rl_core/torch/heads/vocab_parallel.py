"""Logprobs, entropy, the most likely tokens and logprobs at given ids from a head whose vocabulary is split over ranks;
logits never meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rl_core.torch.heads.head_pass import HeadPass, HeadVocabulary, wide_dtype
from rl_core.torch.heads.logprobs import (
    Head,
    HeadOptions,
    TokenReads,
    empty_reads,
    head_gradients,
    pass_over,
    read_logits_,
)
from rl_core.torch.kernels.exact import computes_exact_rows
from rl_core.torch.kernels.vocabulary import LogitForm, head_products, softmax_statistics


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head that one rank holds.

    Args:
        start: Token id of the first of them.
        vocab_size: Tokens of the whole head; rows for ids beyond it are padding and do not count.
        group: The ranks that hold the whole head between them.
    """

    start: int
    vocab_size: int
    group: dist.ProcessGroup

    def trim(self, rows: Tensor) -> Tensor:
        """Return the rows (weight or bias) that are not padding; possibly none."""
        return rows[: max(0, min(len(rows), self.vocab_size - self.start))]


def vocab_parallel_reads(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    shard: VocabShard,
    *,
    sums_hidden_grad: bool = True,
    **options: Unpack[HeadOptions],
) -> TokenReads:
    """Read the head as `rl_core.torch.heads.logprobs.head_reads` does, from this rank's rows of the head.

    Collective over the group of the shard. At most `[chunk_size, vocab / ranks]` logits exist on a rank. Per chunk,
    three numbers per position are summed over the group (as many more as there are `ids`, and `2 k` gathered for
    top-k); the backward pass talks once, about the hidden states.

    Args:
        hidden: `[n, hidden]`, the same on every rank of the group.
        head: Weight `[vocab / ranks, hidden]` and bias of this rank.
        targets: Int64 `[n]`, token ids of the whole vocabulary.
        shard: Place of this rank's rows in the head.
        sums_hidden_grad: True if the gradient by the hidden states is summed over the group here; otherwise it is this
            rank's part of that sum, for a caller that sums it itself (a reduce-scatter under sequence parallelism).
        **options: Further reads, and how they are computed; ids are of the whole vocabulary.

    Returns:
        The same values on every rank. The loss must be computed alike on every rank too.
    """
    if (allowed := options.get("allowed")) is not None:
        options["allowed"] = allowed._replace(start=shard.start)
    head_pass = pass_over(hidden, head, shard.vocab_size, **options)
    weight = shard.trim(head.weight)
    bias = None if head.bias is None else shard.trim(head.bias)
    ids = options.get("ids")
    ids = targets.new_empty((len(targets), 0)) if ids is None else ids
    run = _Pass(shard, head_pass, sums_hidden_grad)
    return TokenReads(*_VocabParallelReads.apply(hidden, weight, bias, targets, ids, run))


class _Pass(NamedTuple):
    shard: VocabShard
    head: HeadPass
    sums_hidden_grad: bool

    def own(self, ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the columns of token ids on this rank (any column if another rank has it), and whether they are
        here."""
        columns = ids - self.shard.start
        is_here = (columns >= 0) & (columns < num_rows)
        return columns.clamp(0, max(num_rows - 1, 0)), is_here


class _VocabParallelReads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ids: Tensor, options: _Pass
    ) -> tuple[Tensor, ...]:
        head = options.head
        vocabulary = HeadVocabulary(options.shard.vocab_size, options.shard.group)
        found, log_sums, lowest = empty_reads(hidden, targets, ids, head)
        logprobs, entropy, topk_logprobs, topk_ids, logprobs_at, collision = found
        for chunk in head.chunks(len(hidden)):
            if head.is_fused(hidden):
                logits, convert = head_products(hidden[chunk], weight, bias), head.form
            else:
                logits, convert = head.cooled_(head.logits(hidden[chunk], weight, bias)), None
            if computes_exact_rows():
                allowed = head.allowed and head.allowed._replace(start=0)
                whole, every = _whole(logits, options.shard), replace(head, allowed=allowed)
                log_sums[chunk] = read_logits_(whole, chunk, targets, ids, every, found, lowest)
                continue
            if head.token_filter is not None:
                own = options.own(targets[chunk, None], len(weight))
                lowest[chunk] = head.keep_(logits, chunk, vocabulary, *own)
            if head.k:
                topk_logprobs[chunk], topk_ids[chunk] = _topk(logits, options, convert)
            if ids.shape[1]:
                logprobs_at[chunk] = _logits_at(logits, ids[chunk], options, convert)
            log_sum, target, *of_distribution = _statistics_(logits, targets[chunk], options, convert)
            log_sums[chunk] = log_sum
            logprobs[chunk] = target - log_sum
            if head.entropy:
                entropy[chunk] = of_distribution[0]
            if head.collision:
                collision[chunk] = of_distribution[1]
            del logits, of_distribution  # They are freed before the next chunk's are made.
        if not computes_exact_rows():
            topk_logprobs -= log_sums[:, None]
            logprobs_at -= log_sums[:, None]
        logprobs_at.masked_fill_(ids < 0, 0.0)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets, ids, log_sums, entropy, topk_ids, collision, lowest)
        ctx.mark_non_differentiable(topk_ids)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = head_gradients(ctx, grads, ctx.options.head, ctx.options.own)
        if total.hidden is not None and ctx.options.sums_hidden_grad:
            dist.all_reduce(total.hidden, group=ctx.options.shard.group)
        return (*total.results(), None, None, None)


def _whole(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return the logits `[n, vocab]` of the whole vocabulary, gathered from all ranks; collective.

    Sums over parts of the vocabulary would be added in another order than the sum over all of it.
    """
    size = dist.get_world_size(shard.group)
    width = -(-shard.vocab_size // size)
    parts = logits.new_empty((size * len(logits), width))
    dist.all_gather_single(parts, pad(logits, (0, width - logits.shape[1])), group=shard.group)
    return parts.view(size, -1, width).transpose(0, 1).reshape(len(logits), -1)[:, : shard.vocab_size].contiguous()


def _statistics_(logits: Tensor, targets: Tensor, options: _Pass, convert: LogitForm | None) -> tuple[Tensor, ...]:
    """Return log sum, logit of the target, entropy and collision, each `[n]`, of the whole vocabulary's logits.

    With m the largest logit and S the sum of exp(z - m): log sum = m + log S, H = log S - sum exp(z - m)(z - m) / S,
    C = sum exp(z - m)^2 / S^2.

    Args:
        logits: `[n, rows]` of this rank, over the temperature; used up. Products of hidden states and head with
            `convert`.
        targets: Int64 `[n]`, token ids of the whole vocabulary.
        options: Shard of the head, and the statistics that are read.
        convert: Conversion of products to logits, by kernels that read them; None of logits.
    """
    group, num_rows = options.shard.group, logits.shape[1]
    columns, is_here = options.own(targets, num_rows)
    if convert is not None:
        of_rank = softmax_statistics(logits, convert, squares=options.head.collision)
        largest = of_rank.largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        of_rank = of_rank.shifted(largest)
        target = torch.zeros_like(largest)
        if num_rows:
            own = convert(logits.gather(1, columns[:, None]))[:, 0]
            target = (own - largest).where(is_here, target)
        parts = [of_rank.total, target, of_rank.weighted, of_rank.squares]
        sums = torch.stack(parts[: 4 if options.head.collision else 3])
    else:
        largest = logits.new_full((len(logits),), -torch.inf) if num_rows == 0 else logits.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.sub_(largest[:, None])
        sums = logits.new_zeros(4 if options.head.collision else 3, len(logits))
        if num_rows:
            sums[1] = shifted.gather(1, columns[:, None])[:, 0].where(is_here, sums.new_zeros(()))
        weights = shifted.exp() if options.head.entropy else shifted.exp_()
        sums[0] = weights.sum(1)
        if options.head.collision:
            sums[3] = weights.square().sum(1)
        if options.head.entropy:
            sums[2] = weights.mul_(shifted).sum(1)
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    collision = sums[3] / sums[0].square() if options.head.collision else sums[0]
    return largest + log_sum, largest + sums[1], log_sum - sums[2] / sums[0], collision


def _logits_at(logits: Tensor, ids: Tensor, options: _Pass, convert: LogitForm | None) -> Tensor:
    """Return the logits `[n, m]` of the whole vocabulary at ids; 0 at -1. See `_statistics_` about `convert`."""
    found = logits.new_zeros(ids.shape, dtype=wide_dtype(logits.dtype))
    if logits.shape[1]:
        columns, is_here = options.own(ids, logits.shape[1])
        chosen = logits.gather(1, columns)
        found = (chosen if convert is None else convert(chosen)).where(is_here, found)
    dist.all_reduce(found, group=options.shard.group)
    return found


def _topk(logits: Tensor, options: _Pass, convert: LogitForm | None) -> tuple[Tensor, Tensor]:
    """Return the largest logits `[n, k]` of the whole vocabulary in descending order, and their ids. See `_statistics_`
    about `convert`."""
    group, k = options.shard.group, options.head.k
    values = logits.new_full((len(logits), k), -torch.inf, dtype=wide_dtype(logits.dtype))
    ids = torch.zeros((len(logits), k), dtype=torch.int64, device=logits.device)
    candidates = logits[:, : max(options.head.below - options.shard.start, 0)]
    here = min(k, candidates.shape[1])
    if here:
        chosen, found = candidates.topk(here)
        values[:, :here] = chosen if convert is None else convert(chosen)
        ids[:, :here] = found + options.shard.start
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    all_ids = [torch.empty_like(ids) for _ in all_values]
    dist.all_gather(all_values, values, group=group)
    dist.all_gather(all_ids, ids, group=group)
    best, place = torch.cat(all_values, 1).topk(k)
    return best, torch.cat(all_ids, 1).gather(1, place)
