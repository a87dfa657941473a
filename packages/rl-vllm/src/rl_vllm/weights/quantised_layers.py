"""Layers of an engine that quantise the weights they are given, and what they hold afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
    CutlassFp8BlockScaledMMKernel,
    CutlassFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
    OnlineLinearBase,
    _is_tp_sharded,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant

from rl_core.torch.quantization.float8 import LARGEST, Float8Recipe, Float8Weight, largest_values

RECIPES: Mapping[type[OnlineLinearBase], Float8Recipe] = {
    Fp8PtpcOnlineLinearMethod: Float8Recipe("per_channel", smallest_scale=1 / (LARGEST * 512)),
    Fp8PerBlockOnlineLinearMethod: Float8Recipe(
        "per_block", smallest_scale=float(torch.tensor(1e-4) / torch.tensor(LARGEST)), multiplies=True
    ),
    Fp8PerTensorOnlineLinearMethod: Float8Recipe("per_tensor", multiplies=True),
}
"""vLLM's methods that quantise, to what they compute (`vllm/model_executor/layers/quantization/online/fp8.py`)."""

METHODS: Mapping[str, type[OnlineLinearBase]] = {
    "fp8_per_channel": Fp8PtpcOnlineLinearMethod,
    "fp8_per_block": Fp8PerBlockOnlineLinearMethod,
    "fp8_per_tensor": Fp8PerTensorOnlineLinearMethod,
}
"""Values of `vllm_cfg.quantization.method` that are accepted, to vLLM's methods."""

PLAIN_KERNELS = (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
    CutlassFP8ScaledMMLinearKernel,
    CutlassFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel,
)
"""Kernels that keep values and scales in row-major order, at most padded. Others are checked by what they compute."""


def is_quantising(layer: nn.Module) -> TypeGuard[LinearBase]:
    """Return whether a layer quantises the weights it is given."""
    return isinstance(layer, LinearBase) and isinstance(layer.quant_method, OnlineLinearBase)


@dataclass(frozen=True, eq=False)
class QuantisedLayer:
    """A layer that quantises its weight.

    Args:
        path: Name in the engine's model.
        module: The layer.
        recipe: How it quantises.
    """

    path: str
    module: LinearBase
    recipe: Float8Recipe

    def largest(self, weight: Tensor) -> Tensor:
        """Largest absolute values that share each scale, over all tensor-parallel ranks that have a part of them; these
        must call this for the same layers in the same order.

        Args:
            weight: This rank's part `[outputs, inputs]`.
        """
        found = largest_values(weight, self.recipe.granularity)
        if self.recipe.granularity == "per_block":
            return found
        is_split = _is_tp_sharded(self.module, reduces_output_dim=self.recipe.granularity == "per_tensor")
        return amax_for_tp_weight_quant(found, is_split)

    @property
    def is_readable(self) -> bool:
        """Return whether `held` is in the order of the recipe."""
        return isinstance(self.module.quant_method.fp8_linear, PLAIN_KERNELS)

    @property
    def scales(self) -> Tensor:
        """Scales that the layer computes with, in its kernel's order."""
        found: Tensor = self.module.weight_scale_inv if self._is_per_block else self.module.weight_scale
        return found.detach()

    def held(self) -> Float8Weight:
        """Values and scales that the layer computes with, without padding, if they are readable."""
        rows, columns = self.module.output_size_per_partition, self.module.input_size_per_partition
        weight = self.module.weight.detach()
        if self._is_per_block:
            return Float8Weight(weight, self.scales, "per_block")
        values = weight.t()[:rows, :columns]
        if self.recipe.granularity == "per_tensor":
            return Float8Weight(values, self.scales.reshape(1, 1), "per_tensor")
        return Float8Weight(values, self.scales.reshape(-1, 1)[:rows], "per_channel")

    def computed(self, columns: Tensor) -> Tensor:
        """Return columns of the weight as the layer multiplies with them, float32 `[outputs, columns]`: products with
        rows that are 1 at one place, which 8 bits hold exactly.

        Args:
            columns: int64, the columns.
        """
        width, dtype = self.module.input_size_per_partition, self.module.orig_dtype
        rows = torch.zeros(len(columns), width, dtype=dtype, device=columns.device)
        rows.scatter_(1, columns[:, None], 1)
        found: Tensor = self.module.quant_method.apply(self.module, rows, None)
        return found.t()[: self.module.output_size_per_partition].float()

    @property
    def _is_per_block(self) -> bool:
        return self.recipe.granularity == "per_block"


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLayer]:
    """The layers of this rank that quantise their weights in a format that has a recipe here, by their names."""
    return {
        path: QuantisedLayer(path, layer, RECIPES[type(layer.quant_method)])
        for path, layer in model.named_modules()
        if is_quantising(layer) and type(layer.quant_method) in RECIPES
    }
