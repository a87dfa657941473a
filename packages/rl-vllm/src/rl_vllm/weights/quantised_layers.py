"""Layers of an engine that quantise the weights they are given, and the check of their values afterwards.

The weights arrive in the policy's precision, and their bytes are compared with the bytes that were sent
(`rl_core.torch.transport`). Every layer then quantises its part. At that moment the part is at hand, and the check
quantises it as well, by its own implementation of the recipe: the result of vLLM must be equal, bit by bit. After the
load the layer must still hold that result. A sample of its products must equal the products of the recipe's values and
scales, which also holds for kernels that store them in their own order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant

from rl_core.torch.quantization.float8 import LARGEST, Float8Recipe, Float8Weight, largest_values, scale_faults
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests

RECIPES: Mapping[type[fp8.OnlineLinearBase], Float8Recipe] = {
    fp8.Fp8PtpcOnlineLinearMethod: Float8Recipe("per_channel", smallest_scale=1 / (LARGEST * 512)),
    fp8.Fp8PerBlockOnlineLinearMethod: Float8Recipe(
        "per_block", smallest_scale=float(torch.tensor(1e-4) / torch.tensor(LARGEST)), multiplies=True
    ),
    fp8.Fp8PerTensorOnlineLinearMethod: Float8Recipe("per_tensor", multiplies=True),
}
"""vLLM's methods that quantise, to their recipes (`vllm/model_executor/layers/quantization/online/fp8.py`)."""

METHODS = {f"fp8_{recipe.granularity}": method for method, recipe in RECIPES.items()}
"""Values of `vllm_cfg.quantization.method` that are accepted, to vLLM's methods."""

PLAIN_KERNELS = (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
    CutlassFP8ScaledMMLinearKernel,
    CutlassFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel,
)
"""Kernels that keep values and scales in row-major order, at most padded. Others are checked by their products."""

NUM_COLUMNS = 8
ROUNDING = 2.0**-7
"""Relative error of a product that is rounded to bfloat16, by kernels that round the weight to it first."""


def is_quantising(layer: nn.Module) -> TypeGuard[LinearBase]:
    """Return whether a layer quantises the weights it is given."""
    return isinstance(layer, LinearBase) and isinstance(layer.quant_method, fp8.OnlineLinearBase)


@dataclass(frozen=True, eq=False)
class QuantisedLayer:
    """A layer that quantises its weight.

    Args:
        path: Name in the engine's model.
        module: The layer.
        recipe: Recipe of its quantisation.
    """

    path: str
    module: LinearBase
    recipe: Float8Recipe

    def largest(self, weight: Tensor) -> Tensor:
        """Return the largest absolute values that share each scale, over all tensor-parallel ranks that have a part of
        them. These ranks must call this for the same layers in the same order.

        Args:
            weight: This rank's part `[outputs, inputs]`.
        """
        found = largest_values(weight, self.recipe.granularity)
        if self.recipe.granularity == "per_block":
            return found
        is_split = fp8._is_tp_sharded(self.module, reduces_output_dim=self.recipe.granularity == "per_tensor")
        return amax_for_tp_weight_quant(found, is_split)

    @property
    def is_readable(self) -> bool:
        """True if `held` is in the order of the recipe."""
        return isinstance(self.module.quant_method.fp8_linear, PLAIN_KERNELS)

    @property
    def scales(self) -> Tensor:
        """Scales that the layer computes with, in its kernel's order."""
        is_per_block = self.recipe.granularity == "per_block"
        found: Tensor = self.module.weight_scale_inv if is_per_block else self.module.weight_scale
        return found.detach()

    def held(self) -> Float8Weight:
        """Return the values and scales that the layer computes with, without padding, if they are readable."""
        rows, columns = self.module.output_size_per_partition, self.module.input_size_per_partition
        weight = self.module.weight.detach()
        if self.recipe.granularity == "per_block":
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


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLayer]:
    """Return the layers of this rank that quantise their weights in a format that has a recipe here, by their names."""
    return {
        path: QuantisedLayer(path, layer, RECIPES[type(layer.quant_method)])
        for path, layer in model.named_modules()
        if is_quantising(layer) and type(layer.quant_method) in RECIPES
    }


@dataclass
class _Quantised:
    """The values that a layer must hold.

    Args:
        weight: Digest of the tensor of values that was made for the layer's kernel.
        scales: The tensor of scales that was made for it.
        sample: float32 `[outputs, sampled columns]`, dequantised by the recipe.
        columns: int64, the sampled columns.
        faults: Problems that were found when the layer had been quantised.
    """

    weight: PendingDigest
    scales: Tensor
    sample: Tensor
    columns: Tensor
    faults: list[str]


class QuantisationCheck:
    """The check of one weight version in one rank.

    Args:
        model: This rank's part of the engine's model.
        version: Chooses the columns that are sampled.
        uses_oracle: Compare all values in float64 with the weights that arrived, and measure the error.
    """

    def __init__(self, model: nn.Module, version: int, *, uses_oracle: bool) -> None:
        self._layers = quantised_layers(model)
        self._version = version
        self._uses_oracle = uses_oracle
        self._expected: dict[str, _Quantised] = {}
        self._before: dict[str, Tensor] = {}
        self._sum_of_squares = 0.0

    @property
    def error(self) -> tuple[int, float | None]:
        """Number of layers that quantise, and the sum over them of the squared errors that were measured while the
        weights were loaded, each relative to the norm of its weight; None if they were not measured."""
        return len(self._layers), self._sum_of_squares if self._uses_oracle else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Quantise again the weights that the layers quantise while weights are loaded."""
        self._before = {path: layer.scales.clone() for path, layer in self._layers.items()}
        for layer in self._layers.values():
            method = layer.module.quant_method
            process = method.process_weights_after_loading
            method.process_weights_after_loading = partial(self._process, layer, process)
        try:
            yield
        finally:
            for layer in self._layers.values():
                del layer.module.quant_method.process_weights_after_loading

    def _process(self, layer: QuantisedLayer, process: Callable[[nn.Module], None], module: nn.Module) -> None:
        """Quantise a layer, and compare the result with the recipe."""
        weight = module.weight.detach()
        largest = layer.largest(weight)
        process(module)
        expected = layer.recipe.quantise_with(weight, layer.recipe.scales(largest))
        faults = scale_faults(expected.scales, largest)
        if layer.is_readable and not faults:
            faults = _differences(layer.held(), expected, weight)
        if self._uses_oracle and not faults:
            if beyond := expected.num_beyond_half_step(weight):
                faults = [f"{beyond} values are further from the weights than half a step of their format"]
            self._sum_of_squares += expected.relative_error(weight) ** 2
        generator = torch.Generator("cpu").manual_seed(self._version)
        order = torch.randperm(weight.shape[1], generator=generator, device="cpu")
        columns = order[:NUM_COLUMNS].sort().values.to(weight.device)
        made, scales = begin_digest(layer.module.weight), layer.scales.clone()
        sample = expected.dequantised_columns(columns)
        self._expected[layer.path] = _Quantised(made, scales, sample, columns, faults)

    def faults(self) -> dict[str, list[str]]:
        """Return the names of layers to the faults of the weights that they compute with."""
        taken = {path: layer for path, layer in self._layers.items() if path in self._expected}
        made = read_digests([self._expected[path].weight for path in taken])
        held = read_digests([begin_digest(layer.module.weight) for layer in taken.values()])
        found = {path: ["its weight was not quantised anew"] for path in self._layers if path not in taken}
        for (path, layer), digest_made, digest_held in zip(taken.items(), made, held, strict=True):
            expected = self._expected[path]
            reasons = [*expected.faults, *self._scale_differences(layer, expected.scales)]
            if digest_held != digest_made:
                reasons.append(f"its values have digest {digest_held}, and {digest_made} when they had been made")
            if not reasons:
                actual = layer.computed(expected.columns)
                wrong = ~((actual - expected.sample).abs() <= ROUNDING * expected.sample.abs())
                if count := int(wrong.sum()):
                    reasons = [f"{count} of {wrong.numel()} sampled products are not those of its quantised weight"]
            if reasons:
                found[path] = reasons
        return found

    def _scale_differences(self, layer: QuantisedLayer, made: Tensor) -> list[str]:
        scales = layer.scales
        if torch.equal(scales, made):
            return []
        found = [f"{int((~(scales == made)).sum())} of {made.numel()} scales are not those of its weight"]
        if torch.equal(scales, self._before[layer.path]):
            found.append("they are those of the version before")
        counts = {"not finite": int((~scales.isfinite()).sum()), "zero": int((scales == 0).sum())}
        return [*found, *(f"{count} are {fault}" for fault, count in counts.items() if count)]


def _differences(made: Float8Weight, expected: Float8Weight, weight: Tensor) -> list[str]:
    """Return the differences of vLLM's result for a weight from the recipe's. Kernels that compute quotients in another
    order may round one next to the middle of two values to either."""
    if not torch.equal(made.scales, expected.scales):
        wrong = int((~(made.scales == expected.scales)).sum())
        return [f"{wrong} of {expected.scales.numel()} scales that vLLM made are not those of the recipe"]
    if torch.equal(*(each.values.contiguous().view(torch.uint8) for each in (made, expected))):
        return []
    beyond = made.num_beyond_half_step(weight)
    return [f"{beyond} values that vLLM made are not the nearest to the weights"] if beyond else []
