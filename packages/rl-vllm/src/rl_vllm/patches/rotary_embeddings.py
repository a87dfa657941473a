"""Rotary embeddings of vLLM on CPU, for queries and keys that have their heads in their own dimension.

- Fault: the kernel takes the heads of `[tokens, heads, head_dim]` for tokens and rotates each by the position of
  another token, without a message. Models with latent attention (DeepSeek-V3) and LFM2 pass three dimensions.
- vLLM 0.32.0, `csrc/cpu/pos_encoding.cpp`, called by `vllm/model_executor/layers/rotary_embedding/base.py`.
- Upstream: no upstream issue found on 2026-11-26. https://github.com/vllm-project/vllm/pull/14667 (merged) mended the
  number of tokens in the same kernel, which had read beyond its input.
- Delete when
  `tests/patches/test_rotary_embeddings.py::test_vllms_kernel_is_wrong_for_heads_in_a_dimension_of_their_own` fails.
"""

from __future__ import annotations

from functools import wraps

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


def flatten_heads_on_cpu() -> None:
    """Pass queries and keys to vLLM's kernel on CPU as `[tokens, heads * head_dim]`, whatever a model passes."""
    kernel = RotaryEmbedding.forward_cpu

    @wraps(kernel)
    def forward_cpu(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        flat_key = None if key is None else key.reshape(*positions.shape, -1)
        rotated, rotated_key = kernel(self, positions, query.reshape(*positions.shape, -1), flat_key)
        return rotated.view_as(query), None if rotated_key is None else rotated_key.view_as(key)

    RotaryEmbedding.forward_cpu = forward_cpu
