"""Checks of a model before its ranks are there: everything that building it asks of its config and of the settings."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_core.model_config import ModelConfig
from rl_core.torch.files.model_files import read_hf_config
from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import family_of
from rl_megatron.families.rotary import inverse_frequencies
from rl_megatron.model.architecture import has_engine_layers, transformer_config
from rl_megatron.model.lora import targeted_adapters
from rl_megatron.model.recompute import recomputed_modules


def check_design(config: ModelConfig, backend: MegatronConfig, folder: Path, *, is_cuda: bool) -> None:
    """Raise what building a model raises, without weights and ranks. It calls the functions that build the model.

    Args:
        config: Config of the model.
        backend: Settings of the backend.
        folder: Folder of the model's files.
        is_cuda: True if the model is to run on GPUs.

    Raises:
        ValueError: If the model, the settings and the layout do not fit together.
    """
    hf = read_hf_config(folder, config.hf_config_overrides)
    has_te = has_engine_layers(backend, is_cuda=is_cuda, has_adapters=config.lora_cfg.enabled)
    dtype = getattr(torch, config.precision)
    megatron = transformer_config(hf, backend, dtype=dtype, is_cuda=is_cuda, has_te=has_te)
    if backend.recompute not in ("none", "full"):
        recomputed_modules(backend, megatron, has_te=has_te)
    family = family_of(hf)
    maps = family.weights(hf)
    if config.lora_cfg.enabled:
        targeted_adapters(maps, hf.model_type, config.lora_cfg, backend.tensor_model_parallel_size)
    expert_tensor = backend.expert_tensor_parallel_size or backend.tensor_model_parallel_size
    sizes = {"tp": backend.tensor_model_parallel_size, "etp": expert_tensor}
    for entry in maps:
        entry.check_split(sizes[entry.over])
    if not megatron.multi_latent_attention:
        inverse_frequencies(hf, family.rotary_dim(hf))
