"""Causal attention of the local layers: within each row, packed or padded, over context-parallel ranks."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from rl_core.torch.training.zigzag import zigzag_order, zigzag_slices


class RowAttention(nn.Module):
    """Megatron's core attention if Transformer Engine is not installed; its own supports neither packed rows nor
    context parallelism.

    Under context parallelism each rank has two slices of each row (`rl_core.torch.training.zigzag`) as queries, and
    gathers the keys and values of all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)
        self.attention_dropout = config.attention_dropout
        self.window = None if config.window_size is None else config.window_size[0] + 1
        self.group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # not used: the rows' boundaries replace it
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of the rows.

        Args:
            query: `[tokens, heads, dim]` if packed, else `[seq, batch, heads, dim]`; this rank's part of the sequences.
            key: Same layout as `query`; may have fewer heads. On one context-parallel rank there may be more keys than
                queries, which are then the last ones: a cache holds the earlier keys.
            value: Same layout as `key`; may have another dim.
            attention_mask: Not used: the boundaries of the rows replace it.
            packed_seq_params: Boundaries of packed rows; None if rows are padded.

        Returns:
            `[tokens, heads * dim]` or `[seq, batch, heads * dim]`.
        """
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            if self.group.size() == 1:
                out = self._attend(query, key, value)
            else:
                out = self._rows(query, key, value, lengths=(query.shape[2],))
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q
        if self._is_flash(query, value):
            longest = packed_seq_params.max_seqlen_q
            window = (-1 if self.window is None else self.window - 1, 0)
            packed = varlen_attn(
                query, key, value, bounds, bounds, longest, longest, scale=self.scale, window_size=window,
                enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
            return cast("Tensor", packed).flatten(1)
        lengths = tuple((bounds.diff() // self.group.size()).tolist())
        parts = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return self._rows(*parts, lengths=lengths)[0].transpose(0, 1).flatten(1)

    def _is_flash(self, query: Tensor, value: Tensor) -> bool:
        is_plain = self.group.size() == 1 and (self.attention_dropout == 0.0 or not self.training)
        is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        return is_plain and is_half and query.shape[-1] == value.shape[-1]

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
        """`[batch, heads, tokens, dim]` for rows end to end, `lengths` of this rank's part of each."""
        if self.group.size() > 1:
            key, value = (gather_rows(tensor, lengths, self.group) for tensor in (key, value))
        whole = [length * self.group.size() for length in lengths]
        rows = zip(query.split(lengths, 2), key.split(whole, 2), value.split(whole, 2), strict=True)
        return torch.cat([self._row(*row) for row in rows], 2)

    def _row(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.group.size() == 1:
            return self._attend(query, key, value)
        parts = []
        half = query.shape[2] // 2
        slices = zigzag_slices(key.shape[2], self.group.size(), self.group.rank())
        for (_, end), part in zip(slices, query.split(half, 2), strict=True):
            parts.append(self._attend(part, key[:, :, :end], value[:, :, :end]))
        return torch.cat(parts, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries at the end of the keys."""
        num, before = query.shape[2], key.shape[2] - query.shape[2]
        is_narrow = self.window is not None and key.shape[2] > self.window
        mask = None
        if before or is_narrow:
            places = torch.arange(key.shape[2], device=query.device)
            distance = places[before:, None] - places
            mask = distance >= 0
            if self.window is not None:
                mask &= distance < self.window
        dropout = self.attention_dropout if self.training else 0.0
        if dropout == 0.0:
            return self._product(query, key, value, mask, 0.0)
        # heads differ between tensor-parallel ranks, so dropout must differ too
        with get_cuda_rng_tracker().fork():
            assert num
            return self._product(query, key, value, mask, dropout)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class GatedAttention(SelfAttention):
    """Megatron's attention with gated outputs, also on more tensor-parallel ranks than key-value heads.

    Each rank then gathers all queries and gates of its key-value head and selects its own queries; megatron-core 0.16.1
    forgets to select its own gates.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """As Megatron's method, with the gates `[seq, batch, heads, dim]` only of the returned queries."""
        found = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        if not output_gate or self.config.num_query_groups >= self.world_size:
            return found
        *others, gate = found
        num_sharing = self.world_size // self.config.num_query_groups
        return *others, gate.chunk(num_sharing, 2)[self.tp_group.rank() % num_sharing]


def gather_rows(tensor: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Whole rows in their order, from the slices of every context-parallel rank.

    Args:
        tensor: `[batch, heads, tokens, dim]` of this rank.
        lengths: Lengths of this rank's part of each row.
        group: Context-parallel ranks.
    """
    parts: Tensor = _AllGather.apply(tensor, group)
    rows = []
    for row in parts.split(lengths, 3):
        order = zigzag_order(row.shape[3] * group.size(), group.size())
        ends = row.movedim(0, 2).flatten(2, 3)
        rows.append(ends.index_select(2, order.argsort().to(ends.device)))
    return torch.cat(rows, 2)


class _AllGather(torch.autograd.Function):
    """`[ranks, *shape]`; the gradient of a part is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = tensor.new_empty((group.size(), *tensor.shape))
        dist.all_gather(list(parts.unbind()), tensor.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None
