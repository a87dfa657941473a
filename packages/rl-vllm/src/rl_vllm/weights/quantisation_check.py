"""Checks that an engine holds what its recipe of quantisation makes of the weights that arrived.

The weights arrive in the policy's precision, and their bytes are compared with what was sent
(`rl_core.torch.transport`). Every layer then quantises its part. At that moment the part is at hand, and this check
quantises it as well, by its own implementation of the recipe: what vLLM made must be equal, bit by bit. After the load
the layer must hold what was made. A sample of what it computes must be the product of the recipe's values and scales,
which also holds for kernels that store them in an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_core.torch.quantization.float8 import Float8Weight, scale_faults
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_vllm.weights.quantised_layers import QuantisedLayer, quantised_layers

NUM_COLUMNS = 8
ROUNDING = 2.0**-7
"""Relative error of a product that is rounded to bfloat16, by kernels that round the weight to it first."""


@dataclass
class _Quantised:
    """What a layer must hold.

    Args:
        weight: Digest of the tensor of values that was made for the layer's kernel.
        scales: The tensor of scales that was made for it.
        sample: float32 `[outputs, sampled columns]`, dequantised by the recipe.
        columns: int64, the sampled columns.
        faults: What was wrong when the layer had been quantised.
    """

    weight: PendingDigest
    scales: Tensor
    sample: Tensor
    columns: Tensor
    faults: list[str]


@dataclass(frozen=True)
class QuantisationError:
    """The error of a quantisation, over the layers of one rank.

    Args:
        num_layers: Number of layers that quantise.
        sum_of_squares: Sum over them of the squared errors, each relative to the norm of its weight; None if it was not
            measured.
    """

    num_layers: int
    sum_of_squares: float | None


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
    def error(self) -> QuantisationError:
        """The error that was measured while the weights were loaded."""
        return QuantisationError(len(self._layers), self._sum_of_squares if self._uses_oracle else None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While weights are loaded: quantise again what the layers quantise."""
        self._before = {path: layer.scales.clone() for path, layer in self._layers.items()}
        for layer in self._layers.values():
            method = layer.module.quant_method
            method.process_weights_after_loading = self._watched(layer, method.process_weights_after_loading)
        try:
            yield
        finally:
            for layer in self._layers.values():
                del layer.module.quant_method.process_weights_after_loading

    def faults(self) -> dict[str, list[str]]:
        """Names of layers to what is wrong with the weights that they compute with."""
        taken = {path: layer for path, layer in self._layers.items() if path in self._expected}
        made = read_digests([self._expected[path].weight for path in taken])
        held = read_digests([begin_digest(layer.module.weight) for layer in taken.values()])
        found = {path: ["its weight was not quantised anew"] for path in self._layers if path not in taken}
        for (path, layer), digest_made, digest_held in zip(taken.items(), made, held, strict=True):
            reasons = [*self._expected[path].faults, *self._scale_differences(layer)]
            if digest_held != digest_made:
                reasons.append(f"its values have digest {digest_held}, and {digest_made} when they had been made")
            reasons = reasons or self._miscomputed(layer)
            if reasons:
                found[path] = reasons
        return found

    def _watched(self, layer: QuantisedLayer, process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def watched(module: nn.Module) -> None:
            weight = module.weight.detach()
            largest = layer.largest(weight)
            process(module)
            self._note(layer, weight, largest)

        return watched

    def _note(self, layer: QuantisedLayer, weight: Tensor, largest: Tensor) -> None:
        """Note what was made of a layer's weight, and compare it with the recipe."""
        expected = layer.recipe.quantise_with(weight, layer.recipe.scales(largest))
        faults = scale_faults(expected.scales, largest)
        if layer.is_readable and not faults:
            faults = _differences(layer.held(), expected, weight)
        if self._uses_oracle and not faults:
            if beyond := expected.num_beyond_half_step(weight):
                faults = [f"{beyond} values are further from the weights than half a step of their format"]
            self._sum_of_squares += expected.relative_error(weight) ** 2
        columns = self._columns(weight.shape[1], weight.device)
        self._expected[layer.path] = _Quantised(
            begin_digest(layer.module.weight),
            layer.scales.clone(),
            expected.dequantised_columns(columns),
            columns,
            faults,
        )

    def _scale_differences(self, layer: QuantisedLayer) -> list[str]:
        scales, made = layer.scales, self._expected[layer.path].scales
        if torch.equal(scales, made):
            return []
        found = [f"{int((~(scales == made)).sum())} of {made.numel()} scales are not those of its weight"]
        if torch.equal(scales, self._before[layer.path]):
            found.append("they are those of the version before")
        counts = {"not finite": int((~scales.isfinite()).sum()), "zero": int((scales == 0).sum())}
        return [*found, *(f"{count} are {fault}" for fault, count in counts.items() if count)]

    def _miscomputed(self, layer: QuantisedLayer) -> list[str]:
        expected = self._expected[layer.path]
        actual = layer.computed(expected.columns)
        wrong = ~((actual - expected.sample).abs() <= ROUNDING * expected.sample.abs())
        if not (count := int(wrong.sum())):
            return []
        return [f"{count} of {wrong.numel()} sampled products are not those of its quantised weight"]

    def _columns(self, width: int, device: torch.device) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self._version)
        return torch.randperm(width, generator=generator, device="cpu")[:NUM_COLUMNS].sort().values.to(device)


def _differences(made: Float8Weight, expected: Float8Weight, weight: Tensor) -> list[str]:
    """Differences of what vLLM made of a weight from what the recipe gives. Quotients next to the middle of two values
    may be rounded to either, by kernels that compute them in another order."""
    if not torch.equal(made.scales, expected.scales):
        wrong = int((~(made.scales == expected.scales)).sum())
        return [f"{wrong} of {expected.scales.numel()} scales that vLLM made are not those of the recipe"]
    if torch.equal(*(each.values.contiguous().view(torch.uint8) for each in (made, expected))):
        return []
    beyond = made.num_beyond_half_step(weight)
    return [f"{beyond} values that vLLM made are not the nearest to the weights"] if beyond else []
