"""Linear attention of Qwen3-Next and Qwen3.5, with the gated delta rule (Yang et al., "Gated Delta Networks", 2024)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from rl_core.torch.rows import mix_each_row, zigzag_tokens
from rl_megatron.model.attention import gather_rows


class GatedDeltaNet(nn.Module):
    """A token mixer that carries a state along each row, its heads spread over the tensor-parallel ranks.

    megatron-core 0.16.1's own runs only on the kernels of flash-linear-attention, and supports neither packed rows nor
    context parallelism. Here each context-parallel rank mixes whole rows and keeps its own tokens: the state at a token
    follows from all tokens before it.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, pg_collection: Any, is_by_head: bool, **_: Any
    ) -> None:
        super().__init__()
        self.is_by_head = is_by_head
        size = pg_collection.tp.size()
        self.context: dist.ProcessGroup = pg_collection.cp
        self.num_heads = config.linear_num_key_heads // size
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.eps = config.layernorm_epsilon
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.values_per_key * self.value_dim
        self.widths = [keys, keys, values]
        num_values = self.num_heads * self.values_per_key
        # The inputs are queries, keys, values and gates, then strength and decay of each update.
        self.inputs = [2 * (keys + values), 2 * num_values]
        like: Any = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        linear: Any = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(config.hidden_size, sum(self.inputs) * size, gather_output=False, **linear)
        self.conv_weight = nn.Parameter(torch.empty(2 * keys + values, 1, config.linear_conv_kernel_dim, **like))
        self.A_log = nn.Parameter(torch.empty(num_values, **like))
        self.dt_bias = nn.Parameter(torch.empty(num_values, **like))
        self.norm_weight = nn.Parameter(torch.empty(self.value_dim, **like))
        linear["init_method"] = config.output_layer_init_method
        self.out_proj = RowParallelLinear(
            values * size, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of each row.

        Args:
            hidden: `[seq, batch, hidden]`, `[tokens, 1, hidden]` if packed; this rank's part of it.
            attention_mask: Not used: the boundaries of the rows replace it.
            packed_seq_params: Boundaries of packed rows; None if rows are padded.
            inference_context: Must be None, because no state is kept between calls.

        Returns:
            The same shape, and no bias.
        """
        assert inference_context is None, "linear attention keeps no state between calls"
        rows = self.in_proj(hidden)[0].transpose(0, 1)
        size = self.context.size()
        lengths = (rows.shape[1],)
        if packed_seq_params is not None:
            lengths = tuple((packed_seq_params.cu_seqlens_q.diff() // size).tolist())
        if size > 1:
            rows = gather_rows(rows[:, None], lengths, self.context)[:, 0]
        whole = [length * size for length in lengths]
        mixed = self._mix(rows) if packed_seq_params is None else mix_each_row(self._mix, rows[0], whole)[None]
        if size > 1:
            parts = [zigzag_tokens(length, size, self.context.rank()) for length in whole]
            starts = [sum(whole[:index]) for index in range(len(whole))]
            own = torch.cat([start + part for start, part in zip(starts, parts, strict=True)])
            mixed = mixed.index_select(1, own.to(mixed.device))
        out: Tensor = self.out_proj(mixed.transpose(0, 1).contiguous())[0]
        return out, None

    def _parts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split projected inputs `[..., inputs]` into queries, keys and values, gates, strengths and decays."""
        projected, rates = rows.split(self.inputs, -1)
        if not self.is_by_head:
            joined, gate = projected.split([sum(self.widths), self.widths[-1]], -1)
            strength, decay = rates.chunk(2, -1)
            return joined, gate, strength, decay
        value_width = self.values_per_key * self.value_dim
        by_head = projected.unflatten(-1, (self.num_heads, -1))
        *mixed, gate = by_head.split([self.key_dim, self.key_dim, value_width, value_width], -1)
        strength, decay = (part.flatten(-2) for part in rates.unflatten(-1, (self.num_heads, -1)).chunk(2, -1))
        return torch.cat([part.flatten(-2) for part in mixed], -1), gate, strength, decay

    def _mix(self, rows: Tensor) -> Tensor:
        """Mix projected inputs `[rows, tokens, inputs]` to `[rows, tokens, values]`, each row from its beginning."""
        joined, gate, strength, decay = self._parts_of(rows)
        # Each channel of `[rows, tokens, channels]` is convolved over the tokens up to each.
        weight = self.conv_weight.to(joined.dtype)
        out = F.conv1d(joined.transpose(1, 2), weight, padding=weight.shape[-1] - 1, groups=len(weight))
        convolved = F.silu(out[..., : joined.shape[1]]).transpose(1, 2)
        query, key, value = convolved.split(self.widths, -1)
        query, key = (
            part.unflatten(-1, (-1, self.key_dim)).repeat_interleave(self.values_per_key, 2) for part in (query, key)
        )
        out, _ = torch_chunk_gated_delta_rule(
            query,
            key,
            value.unflatten(-1, (-1, self.value_dim)),
            g=-self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias),
            beta=strength.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )
        # The heads' outputs `[..., dim]` are normed and gated.
        wide = out.float()
        normed = (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(out.dtype)
        # Each tensor-parallel rank has the gradient from its own heads.
        norm = copy_to_tensor_model_parallel_region(self.norm_weight)
        return (norm * normed * F.silu(gate.reshape(out.shape).float())).to(out.dtype).flatten(-2)
