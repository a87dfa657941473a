"""Attention whose bits for a query do not depend on the other queries of a call, nor on the tokens after it.

The softmax is computed over blocks of keys that are counted from the first token of the row, one block after another.
Keys that a query does not see change nothing: their weights are exactly 0, and so is the change of the largest score.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_core.torch.kernels.exact import check_exact_rows
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.kernels import Softmax, kernel_of
from rl_dtensor.model.layers.recurrent import recurrent_mixers
from rl_dtensor.model.layout import Segments
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.fsdp import local

BLOCK = 64
"""Keys of a block."""


def inexact_part(hf: nn.Module) -> str:
    """Return the part of a model that cannot be computed exactly; empty if there is none."""
    model = cast("Any", hf)
    kind = model.config.model_type
    if model.config.get_text_config()._attn_implementation != ROWS:
        return f"attention of {kind} models does not know where rows begin"
    if expert_modules(model):
        return f"{kind} models have experts, whose results are added in the order of the tokens in a batch"
    if recurrent_mixers(model, decoder_layers(model)):
        return f"{kind} models have states, which are computed in other chunks token by token than in one pass"
    return ""


def check_exact(hf: nn.Module, dtype: torch.dtype) -> None:
    """Check that this process computes a model's products alike whatever rows they have.

    Raises:
        ValueError: With the shape of a product that it does not.
    """
    weights = [local(module.weight) for module in hf.modules() if isinstance(module, nn.Linear)]
    check_exact_rows([(weight.shape[0], weight.shape[1]) for weight in weights if weight.numel()], dtype)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
    """Attend as an `rl_dtensor.model.kernels.Attend`, by `attend_in_blocks`; the gradient is the eager kernel's."""
    if softmax.dropout:  # Only passes that are not compared with the generator draw dropout.
        return kernel_of("eager")(query, key, value, segments, softmax)
    return cast("Tensor", _ExactAttention.apply(query, key, value, softmax.sinks, segments, softmax))


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments, softmax: Softmax
    ) -> Tensor:
        assert segments.blocks is None, "rows with images are refused"
        ctx.save_for_backward(query, key, value, sinks)
        ctx.segments, ctx.softmax = segments, softmax
        if segments.keys is not None:
            key, value = key.index_select(2, segments.keys), value.index_select(2, segments.keys)
        num_queries, num_keys = segments.lengths
        parts = zip(query.split(num_queries, 2), key.split(num_keys, 2), value.split(num_keys, 2), strict=True)
        found = []
        for part, count, end in zip(parts, num_queries, num_keys, strict=True):
            last = torch.arange(end - count, end, device=query.device)[None]
            found.append(attend_in_blocks(*part, last, softmax))
        return torch.cat(found, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [None if each is None else each.detach().requires_grad_() for each in saved]
            query, key, value, sinks = inputs
            out = kernel_of("eager")(query, key, value, ctx.segments, replace(ctx.softmax, sinks=sinks))
        present = [each for each in inputs if each is not None]
        found = iter(torch.autograd.grad(out, present, grads[0]))
        return (*(None if each is None else next(found) for each in inputs), None, None)


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, last: Tensor, softmax: Softmax) -> Tensor:
    """Attend to the keys up to the last that each query sees; inside `exact_rows`.

    Args:
        query: `[batch, heads, queries, head_dim]`.
        key: `[batch, shared heads, keys, head_dim]`, from the first token of each row on.
        value: Same layout as `key`.
        last: Int64 `[batch, queries]` or `[1, queries]`, the last key of each query.
        softmax: Conversion of scores into weights, without dropout.

    Returns:
        `[batch, heads, queries, head_dim of the values]`.
    """
    batch, heads, queries, size = query.shape
    shared, num_keys = key.shape[1], key.shape[2]
    groups = heads // shared
    # Heads that share keys are rows of one product.
    rows = query.reshape(batch * shared, groups * queries, size)
    keys, values = (
        F.pad(part, (0, 0, 0, -num_keys % BLOCK)).reshape(batch * shared, -1, part.shape[-1]) for part in (key, value)
    )
    limit = last[:, None, None].expand(batch, shared, groups, queries).reshape(batch * shared, -1, 1)
    scaling = size**-0.5 if softmax.scaling is None else softmax.scaling
    wide = torch.promote_types(query.dtype, torch.float32)
    largest = torch.full_like(limit, torch.finfo(wide).min, dtype=wide)
    total = torch.zeros_like(largest)
    out = total.new_zeros((*rows.shape[:2], value.shape[-1]))
    for start in range(0, num_keys, BLOCK):
        block = slice(start, start + BLOCK)
        scores = torch.bmm(rows, keys[:, block].transpose(1, 2)).to(wide) * scaling
        if softmax.softcap is not None:
            scores = (scores / softmax.softcap).tanh() * softmax.softcap
        distance = limit - torch.arange(start, start + BLOCK, device=query.device)
        seen = distance >= 0 if softmax.window is None else (distance >= 0) & (distance < softmax.window)
        scores = scores.masked_fill(~seen, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrunk = (scores - largest).exp(), (before - largest).exp()
        total = total * shrunk + weights.sum(-1, keepdim=True)
        out = out * shrunk + torch.bmm(weights.to(value.dtype), values[:, block]).to(wide)
    if softmax.sinks is not None:
        sinks = softmax.sinks.to(wide).view(1, shared, groups, 1).expand(batch, -1, -1, queries).reshape(limit.shape)
        before, largest = largest, torch.maximum(largest, sinks)
        shrunk = (before - largest).exp()
        total, out = total * shrunk + (sinks - largest).exp(), out * shrunk
    return (out / total).to(query.dtype).view(batch, heads, queries, -1)
