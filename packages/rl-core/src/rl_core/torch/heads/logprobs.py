"""Logprobs, entropy, the most likely tokens and logprobs at given ids straight from hidden states, without logits for
all tokens at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.hf_config import HFConfig
from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.kept_tokens import WholeVocabulary, leave_out_, lowest_kept


@dataclass(frozen=True)
class LogitTransform:
    """The transform from the product of hidden states and head to logits: `softcap * tanh(scale * x / softcap)`, or
    `scale * x`."""

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


def logit_transform(config: HFConfig) -> LogitTransform:
    """Return the transform that a model family applies between its head and its logits, as its `transformers` config
    says."""
    settings = config.get_text_config().to_dict()
    scale = settings.get("logit_scale") or 1.0
    divisor = settings.get("logits_scaling") or 1.0
    return LogitTransform(scale / divisor, settings.get("final_logit_softcapping"))


@dataclass(frozen=True)
class Head:
    """A language-model head.

    Args:
        weight: `[vocab, hidden]`.
        bias: `[vocab]`.
        transform: Function from products to logits.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform = LogitTransform()


class TokenReads(NamedTuple):
    """Results per position, float32 (float64 from float64 hidden states).

    `logprobs` `[n]`; `entropy` `[n]`, empty unless asked for; `topk_logprobs` and int64 `topk_ids` `[n, k]`;
    `logprobs_at` `[n, m]`, those of the given ids; `collision` `[n]`, the sum of the squared probabilities, likewise
    empty. All but the ids are differentiable.
    """

    logprobs: Tensor
    entropy: Tensor
    topk_logprobs: Tensor
    topk_ids: Tensor
    logprobs_at: Tensor
    collision: Tensor


def head_reads(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    collision: bool = False,
    token_filter: TokenFilter | None = None,
    k: int = 0,
    below: int = 0,
    ids: Tensor | None = None,
    chunk_size: int = 1024,
) -> TokenReads:
    """Read the head at each position. At most `[chunk_size, vocab]` logits exist, in the forward and in the backward
    pass.

    The backward pass computes each chunk's logits again. Reductions are in float32 whatever the dtype of the hidden
    states.

    Args:
        hidden: `[n, hidden]`.
        head: Its weight has the dtype of the hidden states.
        targets: Int64 `[n]`, the token whose logprob is wanted.
        temperature: Divides the logits.
        entropy: True to return it, in nats.
        collision: True to return it.
        token_filter: Limits the distribution at each position to the tokens that it keeps and the target; not with `k`
            or `ids`. Gradients take the tokens that are kept as given.
        k: Number of most likely tokens to return, in descending order.
        below: Ids that these are chosen among are below it; 0 for all.
        ids: Int64 `[n, m]`, tokens whose logprobs are wanted too; -1 stands for none, and its logprob is 0.
        chunk_size: Number of positions whose logits exist at one time.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if k > len(head.weight):
        raise ValueError(f"topk({k}) of a vocabulary of {len(head.weight)} tokens")
    check_filter(token_filter, k, ids)
    options = HeadPass(
        head.transform, temperature, entropy, collision, token_filter, k, below or len(head.weight), chunk_size
    )
    ids = targets.new_empty((len(targets), 0)) if ids is None else ids
    return TokenReads(*_HeadReads.apply(hidden, head.weight, head.bias, targets, ids, options))


def check_filter(token_filter: TokenFilter | None, k: int, ids: Tensor | None) -> None:
    """Raise a `ValueError` for reads of single tokens together with a filter, which may leave them out."""
    if token_filter is not None and (k or ids is not None):
        raise ValueError("the most likely tokens and logprobs at given ids are read of all tokens, without a filter")


@dataclass(frozen=True)
class HeadPass:
    """Conversion of the products of a chunk's hidden states and a head into results. Methods that end in `_` use up
    their arguments."""

    transform: LogitTransform
    temperature: float
    entropy: bool
    collision: bool
    token_filter: TokenFilter | None
    k: int
    below: int
    chunk_size: int

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits before the temperature, in float32 or wider, which may be used up."""
        products = F.linear(hidden, weight, bias)
        return self.transform(products.to(wide_dtype(products.dtype)))

    def cooled_(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in place."""
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def grad_products_(
        self,
        logits: Tensor,
        *,
        log_sum: Tensor,
        entropy: Tensor,
        by_entropy: Tensor,
        collision: Tensor,
        by_collision: Tensor,
        columns: Tensor,
        by_columns: Tensor,
        by_targets: Tensor,
        lowest: Tensor,
        is_here: Tensor | None = None,
    ) -> Tensor:
        """Gradient `[n, vocab]` by the products of hidden states and head.

        With p the probabilities: d logp_t / d z = onehot(t) - p, d H / d z = -p (log p + H), and for the collision C
        d C / d z = 2 p (p - C).

        Args:
            logits: `[n, vocab]`, before the temperature; may be used up.
            log_sum: `[n]`, of the exponentials of the logits over the temperature.
            entropy: `[n]`, in nats; empty if it is not read.
            by_entropy: `[n]`, gradient of the loss by the entropy; empty if it is not read.
            collision: `[n]`, the sum of squared probabilities; empty if it is not read.
            by_collision: `[n]`, gradient of the loss by the collision; empty if it is not read.
            columns: `[n, 1 + k + m]`, of the target, the top-k tokens and the given ids.
            by_columns: `[n, 1 + k + m]`, gradients by their logprobs, 0 if the column is not the token's.
            by_targets: `[n]`, the sum of gradients by all logprobs.
            lowest: `[n, 1]`, the smallest logit over the temperature that the filter keeps; empty without a filter.
            is_here: Bool `[n, 1 + k + m]`, whether this rank has the columns; None if it has all.
        """
        used = logits if self.transform.softcap is None else logits.clone()  # a cap's gradient needs them unchanged
        used = self.cooled_(used)
        if self.token_filter is not None:
            leave_out_(used, lowest, columns[:, :1], None if is_here is None else is_here[:, :1])
        logprobs = used.sub_(log_sum[:, None])
        coefficient = -by_targets[:, None]
        if self.collision:
            grad = logprobs.exp()
            twice = 2 * by_collision[:, None]
            factor = torch.addcmul(coefficient - twice * collision[:, None], twice, grad)
            if self.entropy:
                factor.add_(logprobs.add_(entropy[:, None]).mul_(-by_entropy[:, None]))
            grad.mul_(factor)
        elif self.entropy:
            grad = logprobs.exp()
            grad.mul_(logprobs.add_(entropy[:, None]).mul_(-by_entropy[:, None]).add_(coefficient))
        else:
            grad = logprobs.exp_().mul_(coefficient)
        if grad.shape[1]:
            grad.scatter_add_(1, columns, by_columns)
        return self.transform.backward(self.cooled_(grad), logits)

    def chunks(self, num: int) -> Iterator[slice]:
        for start in range(0, num, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of a pass by hidden states, head and bias, which gather over chunks; None for those that are not
    needed.

    Args:
        hidden: `[n, hidden]`, in the dtype of the hidden states.
        weight: `[vocab, hidden]`, float32 or wider.
        bias: `[vocab]`, likewise.
        inputs: Hidden states, weight and bias of the forward pass.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    inputs: tuple[Tensor, Tensor, Tensor | None]

    @classmethod
    def zero(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> HeadGradients:
        """No gradient yet.

        Args:
            hidden: Hidden states `[n, hidden]` of the forward pass.
            weight: Weight `[vocab, hidden]` of the head.
            bias: Bias `[vocab]` of the head, if it has one.
            needed: True for each of hidden states, weight and bias whose gradient is needed; further entries are not
                read.
        """
        wide = wide_dtype(hidden.dtype)
        return cls(
            torch.zeros_like(hidden) if needed[0] else None,
            torch.zeros_like(weight, dtype=wide) if needed[1] else None,
            torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None,
            (hidden, weight, bias),
        )

    def add_(self, chunk: slice, grad: Tensor) -> None:
        """Add what follows from the gradient `[chunk, vocab]` by the products of a chunk's hidden states and head."""
        hidden, weight, _ = self.inputs
        narrow = grad.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[chunk] = narrow @ weight
        if self.weight is not None:
            _add_product_(self.weight, narrow.T, hidden[chunk])
        if self.bias is not None:
            self.bias.add_(grad.sum(0))

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients by hidden states, weight and bias, each in the dtype of its input."""
        _, weight, bias = self.inputs
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class _HeadReads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ids: Tensor, options: HeadPass
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        num, wide = len(hidden), wide_dtype(hidden.dtype)
        logprobs = hidden.new_empty(num, dtype=wide)
        log_sums = hidden.new_empty(num, dtype=wide)
        entropy = hidden.new_empty(num if options.entropy else 0, dtype=wide)
        topk_logprobs = hidden.new_empty((num, options.k), dtype=wide)
        topk_ids = targets.new_empty((num, options.k))
        logprobs_at = hidden.new_empty(ids.shape, dtype=wide)
        collision = hidden.new_empty(num if options.collision else 0, dtype=wide)
        lowest = hidden.new_empty((num if options.token_filter else 0, 1), dtype=wide)
        for chunk in options.chunks(num):
            logits = options.cooled_(options.logits(hidden[chunk], weight, bias))
            if options.token_filter is not None:
                lowest[chunk] = lowest_kept(logits, options.token_filter, WholeVocabulary(len(weight)))
                leave_out_(logits, lowest[chunk], targets[chunk, None])
            largest = logits.amax(1, keepdim=True)
            shifted = logits.sub_(largest)
            logprobs[chunk] = shifted.gather(1, targets[chunk, None])[:, 0]
            if options.k:
                topk_logprobs[chunk], topk_ids[chunk] = shifted[:, : options.below].topk(options.k)
            logprobs_at[chunk] = shifted.gather(1, ids[chunk].clamp(min=0))
            log_sum = _log_sum_(
                shifted,
                entropy=entropy[chunk] if options.entropy else None,
                collision=collision[chunk] if options.collision else None,
            )
            logprobs[chunk] -= log_sum
            topk_logprobs[chunk] -= log_sum[:, None]
            logprobs_at[chunk] -= log_sum[:, None]
            log_sums[chunk] = log_sum + largest[:, 0]
            del logits, shifted  # before the next chunk's are made
        logprobs_at.masked_fill_(ids < 0, 0.0)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets, ids, log_sums, entropy, topk_ids, collision, lowest)
        ctx.mark_non_differentiable(topk_ids)
        return logprobs, entropy, topk_logprobs, topk_ids, logprobs_at, collision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, ids, log_sums, entropy, topk_ids, collision, lowest = ctx.saved_tensors
        total = HeadGradients.zero(hidden, weight, bias, ctx.needs_input_grad)
        by_targets = torch.cat([grads[0][:, None], grads[2], grads[4].masked_fill(ids < 0, 0.0)], dim=1)
        for chunk in ctx.options.chunks(len(hidden)):
            grad = ctx.options.grad_products_(
                ctx.options.logits(hidden[chunk], weight, bias),
                log_sum=log_sums[chunk],
                entropy=entropy[chunk],
                by_entropy=grads[1][chunk],
                collision=collision[chunk],
                by_collision=grads[5][chunk],
                columns=torch.cat([targets[chunk, None], topk_ids[chunk], ids[chunk].clamp(min=0)], dim=1),
                by_columns=by_targets[chunk],
                by_targets=by_targets[chunk].sum(1),
                lowest=lowest[chunk],
            )
            total.add_(chunk, grad)
            del grad  # before the next chunk's are made
        return (*total.results(), None, None, None)


def _log_sum_(logits: Tensor, *, entropy: Tensor | None, collision: Tensor | None) -> Tensor:
    """`[n]`, the logarithm of the sum S of the exponentials of logits z `[n, vocab]`, none of them positive; they are
    used up. The tensors that are given are written to: the entropy log S - sum exp(z) z / S, the collision
    sum exp(z)^2 / S^2."""
    if entropy is None and collision is None:
        return logits.exp_().sum(1).log_()
    weights = logits.exp()
    total = weights.sum(1)
    log_sum = total.log()
    if collision is not None:
        torch.div(weights.square().sum(1), total.square(), out=collision)
    if entropy is not None:
        torch.sub(log_sum, weights.mul_(logits).sum(1) / total, out=entropy)
    return log_sum


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to a total, which may have a wider dtype, without a tensor of the product's size if it has
    not."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
