"""The padding token's embedding, which Hugging Face's models never train through their inputs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn


def freeze_padding_token(embedding: nn.Module, pad_token_id: int, *, is_scattered: bool) -> None:
    """Let no gradient reach an embedding from positions that look up the padding token (`padding_idx`).

    Args:
        embedding: The word embedding of the first pipeline rank.
        pad_token_id: Token id at whose positions no gradient passes.
        is_scattered: True if its output is spread over the tensor-parallel ranks by sequence parallelism.
    """

    def detach(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        is_padding = inputs[0] == pad_token_id  # [batch, seq]
        if is_scattered:
            size = parallel_state.get_tensor_model_parallel_world_size()
            is_padding = is_padding.T.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(is_padding[..., None], output.detach(), output).contiguous()

    embedding.register_forward_hook(detach)
