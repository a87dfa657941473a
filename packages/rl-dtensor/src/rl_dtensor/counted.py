"""Bytes of a rank of a training step, counted on the real layers of a model without data and without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.model_config import ModelConfig
from rl_core.torch.optim.parameters import frozen_names
from rl_core.torch.training.recompute import ActivationMemory, RecomputePlan, max_tokens, passes_kept
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.recompute import RankParameters, activations_of
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.sizes import AxisSizes


def counted(
    section: Mapping[str, Any], settings: Mapping[str, Any], fields: Mapping[str, Any], ranks: int
) -> dict[str, float]:
    """Count the rank with the most parameters; see `rl_core.plugins.BackendPlugin.counted`.

    Args:
        section: Section of the model, without those of backends and engines.
        settings: Settings of this backend.
        fields: Fields of the language model's Hugging Face config.
        ranks: Number of ranks.
    """
    config, backend = ModelConfig.model_validate(dict(section)), DTensorConfig.model_validate(dict(settings))
    hf_config = AutoConfig.for_model(**fields)
    hf_config._attn_implementation = ROWS
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, config.precision))
    named = dict(hf.named_parameters())
    frozen = set(named) if config.lora_cfg.enabled else set(frozen_names(config, list(named)))
    layers, sizes = decoder_layers(hf), AxisSizes.of(backend, ranks)
    here = -(-len(layers) // sizes.pp)
    trained = {parameter for name, parameter in named.items() if name not in frozen}
    parts = RankParameters.of(hf, layers, here, sizes, trained).bytes_besides(config, backend)
    kept = activations_of(hf, layers, tensor_ranks=sizes.tp, splits_tokens=backend.sequence_parallel)[-here:]
    passes = passes_kept(sizes.pp, backend.pipeline_chunks_per_rank)
    memory = ActivationMemory(kept, max_tokens(config, sizes.cp), passes)
    plans = {
        "none": RecomputePlan(),
        "selective": RecomputePlan(num_selective=here),
        "full": RecomputePlan(num_full=here),
    }
    return {**parts, **{f"activations, recompute {name}": memory.size(plan) for name, plan in plans.items()}}
