"""Logprobs, entropy, the most likely tokens and logprobs at given ids straight from hidden states, without logits for
all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.facts.hf_config import HFConfig
from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.head_pass import (
    AllowedSets,
    HeadGradients,
    HeadPass,
    HeadVocabulary,
    LogitTransform,
    ReadGradients,
    wide_dtype,
)
from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.vocabulary import head_products, softmax_statistics

CHUNK_SIZE = 1024
"""Number of positions whose logits exist at one time, unless the caller sets it."""

FUSED_CHUNK_SIZE = 4096
"""The same if kernels read the head: half-precision products without a copy take a third of the memory per position,
and the gradient by the head, which is read and written once per chunk, costs a quarter."""

WIDEST_FUSED = 4096
"""Largest hidden size of the models that have the larger chunks by default; wider ones have less memory to spare."""


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
    transform: LogitTransform = field(default_factory=LogitTransform)


class TokenReads(NamedTuple):
    """Results per position, float32 (float64 from float64 hidden states).

    `logprobs` `[n]`; `entropy` `[n]`, empty unless asked for; `topk_logprobs` and int64 `topk_ids` `[n, k]`;
    `logprobs_at` `[n, m]`, at the given ids; `collision` `[n]`, the sum of the squared probabilities, likewise
    empty. All but the ids are differentiable.
    """

    logprobs: Tensor
    entropy: Tensor
    topk_logprobs: Tensor
    topk_ids: Tensor
    logprobs_at: Tensor
    collision: Tensor


class HeadOptions(TypedDict, total=False):
    """Options of `head_reads`.

    Args:
        temperature: Divides the logits; 1 if it is not given.
        entropy: True to return it, in nats.
        collision: True to return it.
        token_filter: Limits the distribution at each position to the tokens that it keeps and the target; not with `k`
            or `ids`. Gradients take the tokens that are kept as given.
        allowed: Tokens that a grammar allows at each position, for a filter with `allowed`; None if all are free.
        k: Number of most likely tokens to return, in descending order.
        below: Ids that these are chosen among are below it; 0 for all.
        ids: Int64 `[n, m]`, tokens whose logprobs are wanted too; -1 stands for none, and its logprob is 0.
        chunk_size: Number of positions whose logits exist at one time; None for `chunk_size_of`.
    """

    temperature: float
    entropy: bool
    collision: bool
    token_filter: TokenFilter | None
    allowed: AllowedSets | None
    k: int
    below: int
    ids: Tensor | None
    chunk_size: int | None


def head_reads(hidden: Tensor, head: Head, targets: Tensor, **options: Unpack[HeadOptions]) -> TokenReads:
    """Read the head at each position.

    At most `[chunk_size, vocab]` logits exist, in the forward and in the backward pass. The backward pass computes each
    chunk's logits again. Reductions are in float32 whatever the dtype of the hidden states. On GPUs the products of
    hidden states and head are read once in their own dtype, and their gradient takes their place; reads with a filter
    have a float32 copy instead.

    Args:
        hidden: `[n, hidden]`.
        head: Its weight has the dtype of the hidden states.
        targets: Int64 `[n]`, the token whose logprob is wanted.
        **options: Further reads, and how they are computed.
    """
    head_pass = pass_over(hidden, head, len(head.weight), **options)
    ids = options.get("ids")
    ids = targets.new_empty((len(targets), 0)) if ids is None else ids
    return TokenReads(*_HeadReads.apply(hidden, head.weight, head.bias, targets, ids, head_pass))


def chunk_size_of(hidden: Tensor, chunk_size: int | None, token_filter: TokenFilter | None = None) -> int:
    """Return the number of positions whose logits exist at one time: the given one, or else 4,096 if kernels read the
    head and the hidden states have at most 4,096 features, and 1,024 otherwise.

    Args:
        hidden: `[n, hidden]`.
        chunk_size: Number that the caller asks for; None if it does not.
        token_filter: Filter of the reads, which the kernels do not have.
    """
    if chunk_size is not None:
        return chunk_size
    has_kernels = token_filter is None and takes(hidden) and hidden.shape[1] <= WIDEST_FUSED
    return FUSED_CHUNK_SIZE if has_kernels else CHUNK_SIZE


def pass_over(hidden: Tensor, head: Head, vocab_size: int, **options: Unpack[HeadOptions]) -> HeadPass:
    """Return the pass over a head of `vocab_size` tokens that gives these reads.

    Raises:
        ValueError: If the temperature is not positive, there are fewer than `k` tokens, or single tokens are to be read
            together with a filter, which may leave them out.
    """
    if unknown := options.keys() - HeadOptions.__annotations__.keys():
        raise TypeError(f"unknown options of a read: {', '.join(sorted(unknown))}")
    temperature, k, token_filter = options.get("temperature", 1.0), options.get("k", 0), options.get("token_filter")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if k > vocab_size:
        raise ValueError(f"topk({k}) of a vocabulary of {vocab_size} tokens")
    if token_filter is not None and (k or options.get("ids") is not None):
        raise ValueError("the most likely tokens and logprobs at given ids are read of all tokens, without a filter")
    return HeadPass(
        head.transform,
        temperature,
        chunk_size_of(hidden, options.get("chunk_size"), token_filter),
        entropy=options.get("entropy", False),
        collision=options.get("collision", False),
        token_filter=token_filter,
        allowed=options.get("allowed"),
        k=k,
        below=options.get("below", 0) or vocab_size,
    )


def empty_reads(hidden: Tensor, targets: Tensor, ids: Tensor, options: HeadPass) -> tuple[TokenReads, Tensor, Tensor]:
    """Return results to be written to, and `[n]` logarithms of sums and `[n, 1]` lowest kept logits, likewise."""
    num, wide = len(hidden), wide_dtype(hidden.dtype)
    found = TokenReads(
        logprobs=hidden.new_empty(num, dtype=wide),
        entropy=hidden.new_empty(num if options.entropy else 0, dtype=wide),
        topk_logprobs=hidden.new_empty((num, options.k), dtype=wide),
        topk_ids=targets.new_empty((num, options.k)),
        logprobs_at=hidden.new_empty(ids.shape, dtype=wide),
        collision=hidden.new_empty(num if options.collision else 0, dtype=wide),
    )
    lowest = hidden.new_empty((num if options.token_filter else 0, 1), dtype=wide)
    return found, hidden.new_empty(num, dtype=wide), lowest


class _HeadReads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ids: Tensor, options: HeadPass
    ) -> tuple[Tensor, ...]:
        found, log_sums, lowest = empty_reads(hidden, targets, ids, options)
        for chunk in options.chunks(len(hidden)):
            if options.is_fused(hidden):
                products = head_products(hidden[chunk], weight, bias)
                out = TokenReads(*(part[chunk] for part in found))
                log_sums[chunk] = _read_products(products, targets[chunk], ids[chunk], options, out)
                del products  # They are freed before the next chunk's are made.
                continue
            logits = options.cooled_(options.logits(hidden[chunk], weight, bias))
            log_sums[chunk] = read_logits_(logits, chunk, targets, ids, options, found, lowest)
            del logits  # They are freed before the next chunk's are made.
        found.logprobs_at.masked_fill_(ids < 0, 0.0)
        ctx.options = options
        own = found.entropy, found.topk_ids, found.collision
        ctx.save_for_backward(hidden, weight, bias, targets, ids, log_sums, *own, lowest)
        ctx.mark_non_differentiable(found.topk_ids)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*head_gradients(ctx, grads, ctx.options).results(), None, None, None)


def head_gradients(
    ctx: Any,
    grads: Sequence[Tensor],
    options: HeadPass,
    own: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
) -> HeadGradients:
    """Return the gradients by hidden states, weight and bias, chunk by chunk.

    Args:
        ctx: Context with the tensors that the forward pass saved.
        grads: Gradients by the fields of `TokenReads`.
        options: Pass over the head.
        own: Function from token ids and the number of rows of a rank to the columns of the ids there, and whether they
            are there; None for a whole head.
    """
    hidden, weight, bias, targets, ids, log_sums, entropy, topk_ids, collision, lowest = ctx.saved_tensors
    total = HeadGradients.zero(hidden, weight, bias, ctx.needs_input_grad)
    by_targets = torch.cat([grads[0][:, None], grads[2], grads[4].masked_fill(ids < 0, 0.0)], dim=1)
    for chunk in options.chunks(len(hidden)):
        columns, is_here = torch.cat([targets[chunk, None], topk_ids[chunk], ids[chunk]], dim=1), None
        by_columns = by_targets[chunk]
        if own is None:
            columns = columns.clamp(min=0)
        else:
            columns, is_here = own(columns, len(weight))
            by_columns = by_columns.where(is_here, by_targets.new_zeros(()))
        read = ReadGradients(
            log_sum=log_sums[chunk],
            entropy=entropy[chunk],
            by_entropy=grads[1][chunk],
            collision=collision[chunk],
            by_collision=grads[5][chunk],
            columns=columns,
            by_columns=by_columns,
            by_columns_sum=by_targets[chunk].sum(1),
            lowest=lowest[chunk],
            is_here=is_here,
            allowed=options.allowed_in(chunk),
        )
        grad = options.gradient(hidden[chunk], weight, bias, read)
        total.add_(chunk, grad)
        del grad  # They are freed before the next chunk's are made.
    return total


def read_logits_(
    logits: Tensor, chunk: slice, targets: Tensor, ids: Tensor, options: HeadPass, found: TokenReads, lowest: Tensor
) -> Tensor:
    """Write the results of a chunk from the logits of the whole vocabulary; return `[chunk]`, the logarithm of the sum
    of their exponentials.

    Args:
        logits: `[chunk, vocab]`, over the temperature; used up.
        chunk: Positions of the logits.
        targets: Int64 `[n]`.
        ids: Int64 `[n, m]`; results at -1 are left to the caller.
        options: Reads of the pass.
        found: Results of all positions, to be written to.
        lowest: `[n, 1]`, lowest kept logits of all positions, to be written to; empty without a filter.
    """
    if options.token_filter is not None:
        vocabulary = HeadVocabulary(logits.shape[1])
        lowest[chunk] = options.keep_(logits, chunk, vocabulary, targets[chunk, None])
    largest = logits.amax(1, keepdim=True)
    shifted = logits.sub_(largest)
    logprobs = shifted.gather(1, targets[chunk, None])[:, 0]
    if options.k:
        found.topk_logprobs[chunk], found.topk_ids[chunk] = shifted[:, : options.below].topk(options.k)
    found.logprobs_at[chunk] = shifted.gather(1, ids[chunk].clamp(min=0))
    log_sum = _log_sum_(
        shifted,
        entropy=found.entropy[chunk] if options.entropy else None,
        collision=found.collision[chunk] if options.collision else None,
    )
    found.logprobs[chunk] = logprobs - log_sum
    found.topk_logprobs[chunk] -= log_sum[:, None]
    found.logprobs_at[chunk] -= log_sum[:, None]
    return log_sum + largest[:, 0]


def logprobs_of(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, token_filter: TokenFilter | None = None
) -> Tensor:
    """Return `[n]`, the logprobs of tokens given the logits of the whole vocabulary, by the operations of `head_reads`.

    Args:
        logits: Float32 `[n, vocab]`, before the temperature; kept unchanged.
        targets: Int64 `[n]`.
        temperature: Divides the logits.
        token_filter: Limits the distribution to the tokens that it keeps and the target; None for all.
    """
    options = HeadPass(LogitTransform(), temperature, len(logits), token_filter=token_filter)
    ids = targets.new_empty((len(targets), 0))
    found, _, lowest = empty_reads(logits, targets, ids, options)
    read_logits_(options.cooled_(logits.clone()), slice(0, len(logits)), targets, ids, options, found, lowest)
    return found.logprobs


def _read_products(products: Tensor, targets: Tensor, ids: Tensor, options: HeadPass, out: TokenReads) -> Tensor:
    """Write the results of a chunk by kernels; the logarithm of the sum of exponentials `[n]`.

    Args:
        products: `[n, vocab]`, of hidden states and head.
        targets: Int64 `[n]`.
        ids: Int64 `[n, m]`; results at -1 are left to the caller.
        options: Reads of the pass.
        out: Results of the chunk, to be written to.
    """
    form = options.form
    found = softmax_statistics(products, form, squares=options.collision)
    log_total = found.total.log()

    def logprobs(chosen: Tensor) -> Tensor:
        return (form(chosen) - found.largest[:, None]).sub_(log_total[:, None])

    out.logprobs.copy_(logprobs(products.gather(1, targets[:, None]))[:, 0])
    if options.k:
        chosen, columns = products[:, : options.below].topk(options.k)
        out.topk_logprobs.copy_(logprobs(chosen))
        out.topk_ids.copy_(columns)
    if ids.shape[1]:
        out.logprobs_at.copy_(logprobs(products.gather(1, ids.clamp(min=0))))
    if options.entropy:
        torch.sub(log_total, found.weighted / found.total, out=out.entropy)
    if options.collision:
        torch.div(found.squares, found.total.square(), out=out.collision)
    return log_total + found.largest


def _log_sum_(logits: Tensor, *, entropy: Tensor | None, collision: Tensor | None) -> Tensor:
    """Return `[n]`, the logarithm of the sum S of the exponentials of logits z `[n, vocab]`, none of them positive;
    they are used up. The tensors that are given are written to: the entropy log S - sum exp(z) z / S, the collision sum
    exp(z)^2 / S^2."""
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
