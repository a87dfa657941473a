"""Passes over a language-model head, chunk by chunk: logits, the tokens that a filter keeps, and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rl_core.token_filter import TokenFilter
from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.vocabulary import LogitForm, add_product_, head_products

LEFT_OUT = -1e30
"""Logit of a token that is filtered out: its probability is 0, and products with it stay finite."""

FIRST_CANDIDATES = 256
"""Most likely tokens that top-p looks at first; where they do not hold enough, it looks at more."""


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
        """Return the gradient by the products, from the gradient by the logits and the logits."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        return grad * self.scale if self.scale != 1.0 else grad


class AllowedSets(NamedTuple):
    """The tokens that a grammar allows at each position.

    Args:
        bits: uint8 `[sets, bytes]`, a bit for each token id, the lowest first; ids beyond the bits are in no set.
        sets: Int `[n]`, the set of each position; set 0 has all tokens.
        start: Token id of the first column of logits on this rank.
    """

    bits: Tensor
    sets: Tensor
    start: int = 0

    def leave_out_(self, logits: Tensor, columns: Tensor, is_here: Tensor | None = None) -> Tensor:
        """Give the tokens that are not allowed a probability of 0, except one of each row; see `leave_out_`."""
        if not logits.shape[1]:
            return logits
        ids = torch.arange(self.start, self.start + logits.shape[1], device=logits.device)
        places = (ids >> 3).clamp(max=self.bits.shape[1] - 1)
        # In bytes throughout: a shift by int64 would make a copy of eight bytes for each logit.
        is_out = (self.bits[self.sets][:, places] >> (ids & 7).to(torch.uint8)) & 1 == 0
        is_out |= (ids >= 8 * self.bits.shape[1]) & (self.sets > 0)[:, None]
        sampled = is_out.gather(1, columns)
        is_out.scatter_(1, columns, sampled & ~is_here if is_here is not None else torch.zeros_like(sampled))
        return logits.masked_fill_(is_out, LEFT_OUT)


class ReadGradients(NamedTuple):
    """Gradients of the loss by the reads of a chunk of `n` positions, and the values that these depend on.

    Args:
        log_sum: `[n]`, of the exponentials of the logits over the temperature.
        entropy: `[n]`, in nats; empty if it is not read.
        by_entropy: `[n]`, gradient of the loss by the entropy; empty if it is not read.
        collision: `[n]`, the sum of squared probabilities; empty if it is not read.
        by_collision: `[n]`, gradient of the loss by the collision; empty if it is not read.
        columns: `[n, 1 + k + m]`, of the target, the top-k tokens and the given ids.
        by_columns: `[n, 1 + k + m]`, gradients by their logprobs, 0 if the column is not the token's.
        by_columns_sum: `[n]`, the sum of gradients by all logprobs.
        lowest: `[n, 1]`, the smallest logit over the temperature that the filter keeps; empty without a filter.
        is_here: Bool `[n, 1 + k + m]`, whether this rank has the columns; None if it has all.
        allowed: Tokens that grammars allow; None if all positions are free.
    """

    log_sum: Tensor
    entropy: Tensor
    by_entropy: Tensor
    collision: Tensor
    by_collision: Tensor
    columns: Tensor
    by_columns: Tensor
    by_columns_sum: Tensor
    lowest: Tensor
    is_here: Tensor | None = None
    allowed: AllowedSets | None = None


@dataclass(frozen=True)
class HeadPass:
    """Conversion of the products of a chunk's hidden states and a head into results. Methods that end in `_` use up
    their arguments."""

    transform: LogitTransform
    temperature: float
    chunk_size: int
    entropy: bool = False
    collision: bool = False
    token_filter: TokenFilter | None = None
    allowed: AllowedSets | None = None
    k: int = 0
    below: int = 0

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return logits before the temperature, in float32 or wider, which may be used up."""
        products = F.linear(hidden, weight, bias)
        return self.transform(products.to(wide_dtype(products.dtype)))

    def cooled_(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in place."""
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    @property
    def form(self) -> LogitForm:
        """The conversion of products to logits over the temperature."""
        return LogitForm(self.transform.scale, self.transform.softcap, self.temperature)

    def is_fused(self, hidden: Tensor) -> bool:
        """Return whether kernels read products of hidden states and head as they are, without a float32 copy."""
        return self.token_filter is None and self.transform.scale > 0 and takes(hidden)

    def gradient(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, read: ReadGradients) -> Tensor:
        """Return the gradient `[n, vocab]` by the products of a chunk's hidden states and head, which are computed
        again.

        With kernels it has the dtype of the hidden states, else float32 or wider.
        """
        if not self.is_fused(hidden):
            return self._gradient_(self.logits(hidden, weight, bias), read)
        products = head_products(hidden, weight, bias)
        form = self.form.scale, self.form.softcap, self.form.temperature
        of_entropy = (read.entropy, read.by_entropy) if self.entropy else (None, None)
        of_collision = (read.collision, read.by_collision) if self.collision else (None, None)
        columns = read.columns.contiguous(), read.by_columns.contiguous()
        # The gradient takes the place of the products: one read and one write.
        torch.ops.rl_core.softmax_gradient_(
            products, *form, read.log_sum, read.by_columns_sum, *of_entropy, *of_collision, *columns
        )
        return products

    def _gradient_(self, logits: Tensor, read: ReadGradients) -> Tensor:
        """Return the gradient from logits `[n, vocab]` before the temperature, which may be used up.

        With p the probabilities: d logp_t / d z = onehot(t) - p, d H / d z = -p (log p + H), and for the collision C
        d C / d z = 2 p (p - C).
        """
        used = logits if self.transform.softcap is None else logits.clone()  # a cap's gradient needs them unchanged
        used = self.cooled_(used)
        if self.token_filter is not None:
            is_here = None if read.is_here is None else read.is_here[:, :1]
            if read.allowed is not None:
                read.allowed.leave_out_(used, read.columns[:, :1], is_here)
            leave_out_(used, read.lowest, read.columns[:, :1], is_here)
        logprobs = used.sub_(read.log_sum[:, None])
        coefficient = -read.by_columns_sum[:, None]
        if self.collision:
            grad = logprobs.exp()
            twice = 2 * read.by_collision[:, None]
            factor = torch.addcmul(coefficient - twice * read.collision[:, None], twice, grad)
            if self.entropy:
                factor.add_(logprobs.add_(read.entropy[:, None]).mul_(-read.by_entropy[:, None]))
            grad.mul_(factor)
        elif self.entropy:
            grad = logprobs.exp()
            grad.mul_(logprobs.add_(read.entropy[:, None]).mul_(-read.by_entropy[:, None]).add_(coefficient))
        else:
            grad = logprobs.exp_().mul_(coefficient)
        if grad.shape[1]:
            grad.scatter_add_(1, read.columns, read.by_columns)
        return self.transform.backward(self.cooled_(grad), logits)

    def allowed_in(self, chunk: slice) -> AllowedSets | None:
        """Return the tokens that grammars allow in a chunk of the positions; None if all positions are free."""
        return None if self.allowed is None else self.allowed._replace(sets=self.allowed.sets[chunk])

    def keep_(
        self, logits: Tensor, chunk: slice, vocabulary: HeadVocabulary, columns: Tensor, is_here: Tensor | None = None
    ) -> Tensor:
        """Apply the filter to a chunk's logits in place, and return `[n, 1]`, the smallest logit that it keeps.

        Args:
            logits: `[n, columns]`, over the temperature.
            chunk: Positions of the logits.
            vocabulary: The vocabulary of the columns.
            columns: See `leave_out_`.
            is_here: See `leave_out_`.
        """
        assert self.token_filter is not None
        if (allowed := self.allowed_in(chunk)) is not None:
            allowed.leave_out_(logits, columns, is_here)
        lowest = lowest_kept(logits, self.token_filter, vocabulary)
        leave_out_(logits, lowest, columns, is_here)
        return lowest

    def chunks(self, num: int) -> Iterator[slice]:
        for start in range(0, num, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


class HeadGradients(NamedTuple):
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
            add_product_(self.weight, narrow.T, hidden[chunk])
        if self.bias is not None:
            self.bias.add_(grad.sum(0, dtype=self.bias.dtype))

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return gradients by hidden states, weight and bias, each in the dtype of its input."""
        _, weight, bias = self.inputs
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class HeadVocabulary(NamedTuple):
    """A vocabulary whose logits `[n, columns]` this rank has, all of them or a part.

    Args:
        size: Number of tokens of the whole vocabulary.
        group: Ranks that have all logits between them; None if this one does.
    """

    size: int
    group: dist.ProcessGroup | None = None

    def largest(self, logits: Tensor, k: int) -> Tensor:
        """Return `[n, k]`, the largest logits of the whole vocabulary in descending order; collective."""
        if self.group is None:
            return logits.topk(k).values
        values = logits.new_full((len(logits), k), -torch.inf)
        here = min(k, logits.shape[1])
        if here:
            values[:, :here] = logits.topk(here).values
        everyone = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, values, group=self.group)
        return torch.cat(everyone, 1).topk(k).values

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of each rank's values, in place; collective."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values


@torch.no_grad()
def lowest_kept(logits: Tensor, token_filter: TokenFilter, vocabulary: HeadVocabulary) -> Tensor:
    """Return `[n, 1]`, the smallest logit that the filter keeps at each position, exactly: tokens with the same logit
    as the last that is kept are kept too.

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


def _lowest_of_nucleus(
    logits: Tensor, lowest: Tensor, largest: Tensor, top_p: float, vocabulary: HeadVocabulary, num_candidates: int
) -> Tensor:
    """Return `[n, 1]`, the smallest logit kept: more likely tokens hold less than `top_p` of the mass kept so far."""
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
    """Return probabilities divided by the largest one; 0 below the lowest."""
    return (logits - largest).exp_().masked_fill_(logits < lowest, 0.0)


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
