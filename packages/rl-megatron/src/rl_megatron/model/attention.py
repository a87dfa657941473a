"""Attention of the local layers: causal within each row, packed or padded, over context-parallel ranks; and the parts
of gated and latent attention that megatron-core 0.16.1 computes wrongly."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from rl_core.torch.rows import zigzag_order, zigzag_slices

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latent attention in transformers (`DeepseekV3RMSNorm`)."""


class RowAttention(nn.Module):
    """Megatron's core attention if Transformer Engine is not installed; its own supports neither packed rows nor
    context parallelism.

    Under context parallelism each rank has two slices of each row (`rl_core.torch.rows`) as queries, and
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
        is_narrow = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_narrow and config.window_size is not None else None
        self.group: dist.ProcessGroup = pg_collection.cp
        # Transformer Engine's attention has the same name for it.
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            like: Any = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            self.softmax_offset = nn.Parameter(torch.empty(num_heads, **like))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the attention of the rows.

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
        size = self.group.size()
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            if size == 1:
                out = self._attend(query, key, value)
            else:
                out = self._rows(query, key, value, lengths=(query.shape[2],))
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q
        is_plain = size == 1 and (self.attention_dropout == 0.0 or not self.training)
        is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        if is_plain and is_half and query.shape[-1] == value.shape[-1] and self.softmax_offset is None:
            longest = packed_seq_params.max_seqlen_q
            window = (-1 if self.window is None else self.window - 1, 0)
            packed = varlen_attn(
                query, key, value, bounds, bounds, longest, longest, scale=self.scale, window_size=window,
                enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
            return cast("Tensor", packed).flatten(1)
        lengths = tuple((bounds.diff() // size).tolist())
        parts = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return self._rows(*parts, lengths=lengths)[0].transpose(0, 1).flatten(1)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
        """Return `[batch, heads, tokens, dim]` for rows end to end, with the lengths of this rank's part of each."""
        size = self.group.size()
        if size > 1:
            key, value = (gather_rows(tensor, lengths, self.group) for tensor in (key, value))
        whole = [length * size for length in lengths]
        parts = []
        for row, keys, values in zip(query.split(lengths, 2), key.split(whole, 2), value.split(whole, 2), strict=True):
            if size == 1:
                parts.append(self._attend(row, keys, values))
                continue
            slices = zigzag_slices(keys.shape[2], size, self.group.rank())
            for (_, end), part in zip(slices, row.split(row.shape[2] // 2, 2), strict=True):
                parts.append(self._attend(part, keys[:, :, :end], values[:, :, :end]))
        return torch.cat(parts, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of queries at the end of the keys."""
        before = key.shape[2] - query.shape[2]
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
        # Heads differ between tensor-parallel ranks, so dropout must differ too.
        with get_cuda_rng_tracker().fork():
            return self._product(query, key, value, mask, dropout)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        if self.softmax_offset is not None:
            return self._product_with_sinks(query, key, value, mask, dropout, self.softmax_offset)
        has_groups = query.shape[1] != key.shape[1]
        options: Any = {"is_causal": mask is None, "scale": self.scale, "enable_gqa": has_groups}
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, **options)

    def _product_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, sinks: Tensor
    ) -> Tensor:
        """Return the attention with a further logit per head in each softmax, whose value is zero. The scores of a row
        exist as a whole."""
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        logits = (query @ key.mT) * self.scale
        if mask is None:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~mask, -math.inf)
        sinks = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        shares = torch.cat([logits, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
        return F.dropout(shares, dropout).to(value.dtype) @ value


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
        """Return the result of Megatron's method, with the gates `[seq, batch, heads, dim]` only of the returned
        queries."""
        found = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        if not output_gate or self.config.num_query_groups >= self.world_size:
            return found
        *others, gate = found
        num_sharing = self.world_size // self.config.num_query_groups
        return *others, gate.chunk(num_sharing, 2)[self.tp_group.rank() % num_sharing]


class PlacedAttention(GatedAttention):
    """Megatron's attention with angles for each token of this rank, `[seq, batch, 1, dim]`, instead of for each place
    in a row."""

    _angles: Tensor | None = None

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Compute the attention; Megatron's method gets queries and keys that are rotated."""
        self._angles = rotary_pos_emb
        found = super().forward(*args, rotary_pos_emb=None, **kwargs)
        self._angles = None
        return found

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of Megatron's method, with queries and keys rotated."""
        query, key, *others = super().get_query_key_value_tensors(*args, **kwargs)
        scale = _yarn_get_concentration_factor_from_config(self.config)
        turned = (_apply_rotary_pos_emb_bshd(each, self._angles, mscale=scale) for each in (query, key))
        return *turned, *others


def gather_rows(tensor: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Gather whole rows in their order from the slices of every context-parallel rank.

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


class WholeProjection(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, as in Transformer Engine's latent attention.

    The local layers of megatron-core 0.16.1 spread it over the ranks and gather its output, but do not sum the gradient
    of the shared rotary key: each rank knows only the part from its own heads.

    Args:
        num_shared: Last outputs that all heads use directly, and whose gradient is summed here if no sequence-parallel
            gather does it.
    """

    def __init__(self, config: TransformerConfig, in_features: int, out_features: int, *, num_shared: int = 0) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype, device=device))
        self.is_sequence_parallel = config.sequence_parallel
        self.num_shared = num_shared
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the output and no bias, as Megatron's linear layers do."""
        return self.with_summed_grad(F.linear(hidden, self.weight)), None

    def with_summed_grad(self, out: Tensor) -> Tensor:
        """Return the outputs; the gradient of the shared ones is summed over the tensor-parallel ranks."""
        if not self.num_shared or self.is_sequence_parallel:
            return out
        own, shared = out.split([out.shape[-1] - self.num_shared, self.num_shared], -1)
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        if shared.requires_grad:
            # megatron-core 0.16.1 sums a copy of a gradient that is not contiguous, and continues with the original.
            shared.register_hook(lambda grad: grad.contiguous())
        return torch.cat([own, shared], -1)


def disable_transformer_engine() -> None:
    """Mark Transformer Engine as missing in the module of latent attention. It looks for the names of its imports,
    which Megatron sets to None without it, and then asks whether a layer is an instance of None."""
    multi_latent_attention.HAVE_TE = False


def set_latent_epsilon(chunk: nn.Module) -> None:
    """Give the norms of all latent attention of a model the epsilon that transformers builds them with, whatever
    `rms_norm_eps` is. Layers of Transformer Engine have them in the second projections."""
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                held = vars(module)["_modules"].get(name)
                if held is not None and "eps" in vars(held):
                    held.eps = LATENT_EPSILON


def patch_down_projections(chunk: nn.Module) -> None:
    """Replace the down-projections of all latent attention of a model."""
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            config: Any = module.config
            hidden, rotary = config.hidden_size, config.qk_pos_emb_head_dim
            module.linear_kv_down_proj = WholeProjection(
                config, hidden, config.kv_lora_rank + rotary, num_shared=rotary
            )
            if config.q_lora_rank is not None:
                module.linear_q_down_proj = WholeProjection(config, hidden, config.q_lora_rank)
