"""Divergences of a head's distributions from another model's, over whole vocabularies, without logits for
all tokens at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.model import DIVERGENCES, MIN_TAIL
from rl_core.torch.heads.head_pass import HeadGradients, HeadPass, wide_dtype
from rl_core.torch.heads.logprobs import CHUNK_SIZE, Head
from rl_core.torch.heads.vocab_parallel import VocabShard

NOTHING = -1e4
"""Log of no mass: finite, so that 0 times it is 0, and its exponential is 0."""

NUM_DIFFERENTIABLE = 3
"""Of `DIVERGENCES`, from the first; the others are for reports."""


class Other(NamedTuple):
    """The model that a head is compared with.

    Args:
        hidden: `[n, its hidden size]`, its hidden states, which need no gradient.
        head: Its head; with a `VocabShard`, its rows for this rank's ids.
    """

    hidden: Tensor
    head: Head


def divergences(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    other: Other,
    *,
    below: int,
    beta: float,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    shard: VocabShard | None = None,
    sums_hidden_grad: bool = True,
) -> Tensor:
    """Return `[n, 6]`, at each position the numbers of `DIVERGENCES`, float32 (float64 from float64 hidden
    states); collective over the group of a shard.

    With p the other distribution and q this head's, each over the ids below `below`, one by one, and a tail that holds
    all others: KL(p || q), KL(q || p), and with m = beta p + (1 - beta) q, beta KL(p || m) + (1 - beta) KL(q || m); the
    masses of both tails, and the other logprob of the target. Log masses of tails are at least the log of `MIN_TAIL`.

    At most `[chunk_size, vocab]` logits of both exist (`vocab / ranks` with a shard) and as many for the few steps
    between them and the result. The backward pass computes them again.

    Args:
        hidden: `[n, hidden]`.
        head: This rank's rows of it if there is a `shard`.
        targets: Int64 `[n]`.
        other: Hidden states and head of the model to compare with.
        below: Number of ids that both know.
        beta: Weight of the other in the mixture.
        temperature: Divides the logits of both.
        chunk_size: Number of positions whose logits exist at one time; None for 1,024.
        shard: Place of this rank's rows in the head; None if it has the whole head.
        sums_hidden_grad: As in `vocab_parallel_reads`.

    Raises:
        ValueError: If one of them has fewer ids.
    """
    weight = head.weight if shard is None else shard.trim(head.weight)
    bias = head.bias if head.bias is None or shard is None else shard.trim(head.bias)
    start = 0 if shard is None else shard.start
    num_shared = min(max(below - start, 0), len(weight))
    if num_shared > len(other.head.weight) or below > (len(weight) if shard is None else shard.vocab_size):
        raise ValueError(f"{below} ids are compared, but one of the two models has fewer")
    options = _Comparison(
        HeadPass(head.transform, temperature, chunk_size or CHUNK_SIZE),
        HeadPass(other.head.transform, temperature, chunk_size or CHUNK_SIZE),
        num_shared,
        start,
        beta,
        None if shard is None else shard.group,
        sums_hidden_grad,
    )
    compared = other.hidden.to(other.head.weight.dtype), other.head.weight, other.head.bias
    found: Tensor = _Divergences.apply(hidden, weight, bias, targets, *compared, options)
    return found


@dataclass(frozen=True)
class _Comparison:
    own: HeadPass
    other: HeadPass
    num_shared: int
    start: int
    beta: float
    group: dist.ProcessGroup | None
    sums_hidden_grad: bool

    def summed(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def logprobs_(self, logits: Tensor, log_sum: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logprobs `[n, columns]` from logits over the temperature, which are used up, and `[n, 1]`, the
        logarithm of the sum of all exponentials, computed unless it is given."""
        if log_sum is None:
            largest = logits.new_full((len(logits), 1), -torch.inf)
            if logits.shape[1]:
                largest = logits.amax(1, keepdim=True)
            if self.group is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
            log_sum = self.summed((logits - largest).exp_().sum(1, keepdim=True)).log_() + largest
        return logits.sub_(log_sum).clamp_(min=NOTHING), log_sum

    def values(self, p: Tensor, q: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result `[n, 6]`, and the masses of the tails `[n, 2]`, the other one first.

        Args:
            p: Logprobs `[n, columns]` of the other head.
            q: Logprobs `[n, columns]` of this head.
            targets: Int64 `[n]`, token ids of the whole vocabulary.
        """
        p_here, q_here = p[:, : self.num_shared], q[:, : self.num_shared]
        tails = torch.stack([each[:, self.num_shared :].exp().sum(1) for each in (p, q)], 1)
        columns = targets - self.start
        is_here = (columns >= 0) & (columns < p.shape[1])
        target = p.new_zeros(len(p))
        if p.shape[1]:
            target = p.gather(1, columns.clamp(0, p.shape[1] - 1)[:, None])[:, 0].where(is_here, target)
        kls = torch.stack(_divergences(p_here, q_here, self.beta), 1)
        found = self.summed(torch.cat([kls, tails, target[:, None]], 1))
        tails = found[:, NUM_DIFFERENTIABLE : NUM_DIFFERENTIABLE + 2].clone()
        log_tails = tails.clamp(min=MIN_TAIL).log()
        found[:, :NUM_DIFFERENTIABLE] += torch.stack(_divergences(log_tails[:, :1], log_tails[:, 1:], self.beta), 1)
        return found, tails

    def grad_logits(self, p: Tensor, q: Tensor, tails: Tensor, by_values: Tensor) -> Tensor:
        """Return the gradient `[n, columns]` by this head's logits over the temperature.

        With g the gradient by the logs of the masses of q, each taken as free: `g - q sum(g)`; a logit in the tail has
        its share of the tail's g.
        """
        shared = self.num_shared
        by_masses = self._by_logs(p[:, :shared], q[:, :shared], by_values)
        total = self.summed(by_masses.sum(1, keepdim=True))
        log_tails = tails.clamp(min=MIN_TAIL).log()
        by_tail = self._by_logs(log_tails[:, :1], log_tails[:, 1:], by_values)
        # a tail at its least is a constant
        by_tail = by_tail.where(tails[:, 1:] > MIN_TAIL, by_tail.new_zeros(()))
        weights = q.exp()
        in_tail = by_tail / tails[:, 1:].clamp(min=MIN_TAIL)
        grad = weights * -(total + by_tail)
        grad[:, :shared] += by_masses
        grad[:, shared:] += weights[:, shared:] * in_tail
        return grad

    def _by_logs(self, p: Tensor, q: Tensor, by_values: Tensor) -> Tensor:
        forward, reverse, mixture = (by_values[:, index, None] for index in range(NUM_DIFFERENTIABLE))
        weights = q.exp()
        grad = reverse * weights * (q - p + 1)
        grad -= forward * p.exp()
        grad += mixture * (1 - self.beta) * weights * (q - _mixed(p, q, self.beta))
        return grad


def _divergences(p: Tensor, q: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each `[n]`, from the logs of masses `[n, outcomes]`."""
    forward, reverse = (p.exp() * (p - q)).sum(1), (q.exp() * (q - p)).sum(1)
    mixture = _mixed(p, q, beta)
    return forward, reverse, beta * (p.exp() * (p - mixture)).sum(1) + (1 - beta) * (q.exp() * (q - mixture)).sum(1)


def _mixed(p: Tensor, q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        other_hidden: Tensor,
        other_weight: Tensor,
        other_bias: Tensor | None,
        options: _Comparison,
    ) -> Tensor:
        num, wide = len(hidden), wide_dtype(hidden.dtype)
        found = hidden.new_empty((num, len(DIVERGENCES)), dtype=wide)
        log_sums, tails = hidden.new_empty((num, 2), dtype=wide), hidden.new_empty((num, 2), dtype=wide)
        for chunk in options.own.chunks(num):
            logits = options.other.cooled_(options.other.logits(other_hidden[chunk], other_weight, other_bias))
            p, of_p = options.logprobs_(logits.to(wide), None)
            q, of_q = options.logprobs_(options.own.cooled_(options.own.logits(hidden[chunk], weight, bias)), None)
            log_sums[chunk] = torch.cat([of_p, of_q], 1)
            found[chunk], tails[chunk] = options.values(p, q, targets[chunk])
            del logits, p, q  # They are freed before the next chunk's are made.
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, other_hidden, other_weight, other_bias, log_sums, tails)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_found: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, other_hidden, other_weight, other_bias, log_sums, tails = ctx.saved_tensors
        options: _Comparison = ctx.options
        total = HeadGradients.zero(hidden, weight, bias, ctx.needs_input_grad)
        for chunk in options.own.chunks(len(hidden)):
            other_logits = options.other.logits(other_hidden[chunk], other_weight, other_bias)
            p, _ = options.logprobs_(options.other.cooled_(other_logits).to(log_sums.dtype), log_sums[chunk, :1])
            logits = options.own.logits(hidden[chunk], weight, bias)
            # the gradient of a cap needs them unchanged
            used = logits if options.own.transform.softcap is None else logits.clone()
            q, _ = options.logprobs_(options.own.cooled_(used), log_sums[chunk, 1:])
            grad = options.own.cooled_(options.grad_logits(p, q, tails[chunk], by_found[chunk]))
            total.add_(chunk, options.own.transform.backward(grad, logits))
            del other_logits, p, logits, used, q, grad  # They are freed before the next chunk's are made.
        if total.hidden is not None and options.group is not None and options.sums_hidden_grad:
            dist.all_reduce(total.hidden, group=options.group)
        return (*total.results(), None, None, None, None, None)
