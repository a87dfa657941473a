"""Multi-head latent attention of the local layers, corrected: megatron-core 0.16.1 computes it wrongly without
Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


class WholeProjection(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, as Transformer Engine's latent attention has it.

    The local layers of megatron-core 0.16.1 spread it over the ranks and gather its output, but do not sum the gradient
    of the shared rotary key, of which each rank knows the part of its own heads.

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
        return self.with_summed_grad(nn.functional.linear(hidden, self.weight)), None

    def with_summed_grad(self, out: Tensor) -> Tensor:
        """The outputs; the gradient of the shared ones is summed over the tensor-parallel ranks."""
        if not self.num_shared or self.is_sequence_parallel:
            return out
        own, shared = out.split([out.shape[-1] - self.num_shared, self.num_shared], -1)
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        if shared.requires_grad:
            # megatron-core 0.16.1 sums a copy of a gradient that is not contiguous, and goes on with the original
            shared.register_hook(lambda grad: grad.contiguous())
        return torch.cat([own, shared], -1)


def disable_transformer_engine() -> None:
    """Tell the module that Transformer Engine is missing: it looks for the names of its imports, which Megatron sets to
    None without it, and then asks whether a layer is an instance of None."""
    multi_latent_attention.HAVE_TE = False


def patch_down_projections(chunk: nn.Module) -> None:
    """Replace the down-projections of all latent attention of a model."""
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            config: Any = module.config
            latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
            module.linear_kv_down_proj = WholeProjection(
                config, config.hidden_size, latent, num_shared=config.qk_pos_emb_head_dim
            )
            if config.q_lora_rank is not None:
                module.linear_q_down_proj = WholeProjection(config, config.hidden_size, config.q_lora_rank)
