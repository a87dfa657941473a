"""Buffers of Transformer Engine in which collectives of tensor-parallel ranks overlap with matrix products."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from megatron.core.transformer import TransformerConfig

_ENGINE = "transformer_engine.pytorch"
_is_open = False


def open_buffers(config: TransformerConfig, lengths: Sequence[int]) -> None:
    """Create the buffers; collective over all ranks, before layers are built.

    Args:
        config: Megatron's, with `tp_comm_overlap`.
        lengths: Lengths of packed sequences, on all context-parallel ranks together. Buffers hold exactly one.

    Raises:
        ValueError: If sequences have several lengths, or the model's projections have no buffers.
    """
    global _is_open
    key = "megatron_cfg.megatron_kwargs.tp_comm_overlap"
    if config.multi_latent_attention:
        raise ValueError(f"{key}: the projections of latent attention have no buffers; remove the key")
    if len(lengths) != 1:
        raise ValueError(
            f"{key} needs packed microbatches of one length, and those of this model have {list(lengths) or 'any'}; "
            "set sequence_packing.enabled=true with the same train_mb_tokens and logprob_mb_tokens"
        )
    engine: Any = importlib.import_module(_ENGINE)
    modes = engine.UserBufferQuantizationMode
    used = [modes.FP8 if config.fp8 else modes.NONE]
    if config.fp8 and config.first_last_layers_bf16:
        used.append(modes.NONE)
    engine.initialize_ub(
        shape=[lengths[0] // config.context_parallel_size, config.hidden_size],
        tp_size=config.tensor_model_parallel_size,
        quantization_modes=used,
        dtype=config.params_dtype,
        bootstrap_backend=config.tp_comm_bootstrap_backend,
    )
    _is_open = True


def close_buffers() -> None:
    """Free the buffers, if there are any."""
    global _is_open
    if _is_open:
        engine: Any = importlib.import_module(_ENGINE)
        engine.destroy_ub()
        _is_open = False
