"""Tensors of a model that stay float32 while the rest of it computes in less."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.core_model_loading import build_glob_alternation

from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.training.export import float32_among_others
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.model.gated_delta_net import GatedDeltaNet
from rl_megatron.model.layers import RMSNorm, SharedExperts
from rl_megatron.model.model import ScoreHead
from rl_megatron.model.routing import RowRouter

TAKE_FLOAT32 = (GatedDeltaNet, RMSNorm, RowRouter, ScoreHead)
"""Modules that take float32 parameters with activations of another dtype. Routers, decays of linear attention, norms of
its heads and norms centered at zero compute in float32; the others cast the parameter."""


def kept_in_float32(hf: PreTrainedConfig, maps: Sequence[WeightMap], files: WeightFiles) -> frozenset[str]:
    """Return the names of the Hugging Face tensors that are held, published and exported in float32.

    Args:
        hf: Config of the model.
        maps: Weights of the whole model.
        files: Source of the weights.
    """
    names = {source.name for entry in maps for source in entry.sources}
    return frozenset(kept_by_family(hf, maps) | (float32_among_others(files) & names))


def kept_by_family(hf: PreTrainedConfig, maps: Iterable[WeightMap]) -> set[str]:
    """Return the names of the tensors that a family keeps in float32, by its weight maps or by the list of
    `transformers` in the model's class."""
    pattern: Any = None
    if type(hf) in MODEL_FOR_CAUSAL_LM_MAPPING:
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
        strict = family._keep_in_fp32_modules_strict
        pattern = build_glob_alternation(list(strict))[0] if strict else None
    return {
        source.name
        for entry in maps
        for source in entry.sources
        if entry.dtype == "float32" or (pattern is not None and pattern.search(source.name))
    }


def is_kept(entry: WeightMap, kept: Set[str]) -> bool:
    """Return whether a parameter is held in float32: at least one of the tensors that it is made of is kept."""
    return any(source.name in kept for source in entry.sources)


def hold_in_float32(
    chunks: Iterable[nn.Module], held: Mapping[str, Tensor], entries: Iterable[WeightMap], config: TransformerConfig
) -> None:
    """Make parameters and buffers of a model float32, in place.

    Modules of `TAKE_FLOAT32` use them as they are. In all others, whose products need operands of one dtype, each
    forward pass uses a copy in the model's dtype, as `transformers` computes; gradients are float32.

    Args:
        chunks: Model chunks of this rank.
        held: Parameters and buffers of this rank by target.
        entries: Weights to hold in float32; weights of other ranks are skipped.
        config: Megatron's config, with the dtype of activations.

    Raises:
        ValueError: If a fused kernel of the config takes a parameter only in the model's dtype.
    """
    for entry in entries:
        if entry.target in held:
            held[entry.target].data = held[entry.target].data.float()
    for chunk in chunks:
        for path, module in chunk.named_modules():
            parameters = module.named_parameters(recurse=False)
            names = [name for name, parameter in parameters if parameter.dtype != config.params_dtype]
            if not names or isinstance(module, TAKE_FLOAT32):
                continue
            if config.moe_shared_expert_overlap and isinstance(module, SharedExperts):
                # This kernel uses the parameter itself. Other layers use a copy.
                raise ValueError(
                    "megatron_cfg.megatron_kwargs.moe_shared_expert_overlap does not work with parameters that stay "
                    f"float32, as {path}.{names[0]} of this model does; leave it out"
                )
            # Transformer Engine's module and megatron-core's must add to a gradient in the parameter's own dtype.
            for fused in ("fuse_wgrad_accumulation", "gradient_accumulation_fusion"):
                if fused in vars(module):
                    setattr(module, fused, False)
            casting = _Casting(names, config.params_dtype)
            module.register_forward_pre_hook(casting.start)
            module.register_forward_hook(casting.end, always_call=True)


class _Casting:
    """Replaces parameters of a module by copies in another dtype while its forward pass runs."""

    def __init__(self, names: Sequence[str], dtype: torch.dtype) -> None:
        self._names = names
        self._dtype = dtype
        self._parameters: dict[str, nn.Parameter | None] = {}

    def start(self, module: nn.Module, _: Any) -> None:
        self._parameters = module._parameters
        rest = {name: value for name, value in self._parameters.items() if name not in self._names}
        copies = {name: module.get_parameter(name).to(self._dtype) for name in self._names}
        vars(module).update(copies, _parameters=rest)

    def end(self, module: nn.Module, *_: Any) -> None:
        for name in self._names:
            del vars(module)[name]
        vars(module)["_parameters"] = self._parameters
