"""Root-mean-square norm of the local layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMS norm as transformers computes it: the mean in float32, the product with the weight in the input's dtype, or
    in float32 if weights are centred at zero.

    Unlike Megatron's wrapper of torch's norm it may lie in a sequence-parallel region: its gradient is summed there.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        # the mark by which Megatron finds gradients to sum over the tensor-parallel ranks
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `[*, hidden]`."""
        wide = hidden.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if self.is_zero_centered:
            return (normed * (1 + self.weight.float())).to(hidden.dtype)
        return self.weight.to(hidden.dtype) * normed.to(hidden.dtype)
