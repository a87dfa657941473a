"""Rotary embeddings of vLLM on CPU, for queries and keys that have their heads in a dimension of their own."""

from __future__ import annotations

from functools import wraps

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


def flatten_heads_on_cpu() -> None:
    """Have vLLM's kernel on CPU get queries and keys as `[tokens, heads * head_dim]`, whatever a model passes.

    The kernel (0.32; csrc/cpu/pos_encoding.cpp) takes the heads of `[tokens, heads, head_dim]` for tokens, and rotates
    each by the position of another one, in silence. Models with latent attention (DeepSeek-V3) and LFM2 pass that. To
    be removed once the kernel reads three dimensions as that of GPUs does, which a test looks for.
    """
    kernel = RotaryEmbedding.forward_cpu

    @wraps(kernel)
    def forward_cpu(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        flat_key = None if key is None else key.reshape(*positions.shape, -1)
        rotated, rotated_key = kernel(self, positions, query.reshape(*positions.shape, -1), flat_key)
        return rotated.view_as(query), None if rotated_key is None else rotated_key.view_as(key)

    RotaryEmbedding.forward_cpu = forward_cpu
