"""A worker extension with which tests damage an engine's weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl_core.weights import Manifest
from rl_vllm.engine_worker import EngineWorker, Report
from rl_vllm.weights.planned_load import PlannedLoad
from rl_vllm.weights.quantised_layers import quantised_layers
from rl_vllm.weights.weight_receiver import WeightReceiver


def _one_more(compute: Any, x: Any, weight: Any, bias: Any) -> Any:
    return compute(x, weight, bias) + 1


class SpoilableWorker(EngineWorker):
    """Remembers the packed copy of the head from before a sync, to put it back afterwards."""

    _packed_head: Any = None
    _reloads = False
    _spoiled_layer = ""

    def make_receiver(self, manifest: Manifest) -> WeightReceiver:
        # a model with images has its head within
        head = getattr(self.get_model(), "lm_head", None)
        self._packed_head = None if head is None else head.cpu_linear
        receiver = super().make_receiver(manifest)
        if self._reloads:
            receiver._planned = None
        return receiver

    def reload(self, reloads: bool) -> None:
        """Have vLLM's own reload take in what comes, or no longer."""
        self._reloads = reloads

    def loads_by_plan(self, opaque: str = "") -> bool:
        """Whether a plan is all it takes to load the last manifest, or would be if a parameter's loader computed."""
        planned = self.target("policy").planned
        assert planned is not None
        _, plan, _ = planned
        dtype = self.vllm_config.model_config.dtype
        return (
            PlannedLoad.of(self.get_model(), replace(plan, opaque=plan.opaque | ({opaque} - {""})), dtype) is not None
        )

    def restore_packed_head(self) -> None:
        self.get_model().lm_head.cpu_linear = self._packed_head

    def change_one_value(self, path: str, row: int, column: int) -> None:
        """Make a layer compute with one value other than it received."""
        layer = self.get_model().get_submodule(path)
        compute = layer.cpu_linear

        def spoiled(x: Any, weight: Any, bias: Any) -> Any:
            out = compute(x, weight, bias).clone()
            out[..., row] += x[..., column] * 1e-3
            return out

        layer.cpu_linear = spoiled

    def change_layer(self, part: str) -> None:
        """Make the first layer with a matrix that has this in its name compute with other values than it received."""
        for path, layer in self.get_model().named_modules():
            matrices = [each for each in layer.parameters(recurse=False) if each.ndim > 1]
            if part in path and hasattr(layer, "cpu_linear"):
                layer.cpu_linear = partial(_one_more, layer.cpu_linear)
                return
            if part in path and matrices:
                matrices[0].data.add_(1)
                return
        raise ValueError(f"no layer has {part} in its name")

    def quantised(self) -> dict[str, Any]:
        """Values, scales and the place in memory of the weights of all layers that quantise, by name."""
        return {
            path: (layer.held().values.clone(), layer.held().scales.clone(), layer.module.weight.data_ptr())
            for path, layer in quantised_layers(self.get_model()).items()
        }

    def set_scale(self, path: str, index: int, factor: float) -> None:
        """Multiply a scale that a layer computes with."""
        quantised_layers(self.get_model())[path].scales.view(-1)[index] *= factor

    def set_scales(self, path: str, scales: Any) -> None:
        """Replace the scales that a layer computes with."""
        quantised_layers(self.get_model())[path].scales.view(-1).copy_(scales.view(-1))

    def flip_value(self, path: str, row: int, column: int) -> None:
        """Flip the lowest bit of a value that a layer computes with."""
        quantised_layers(self.get_model())[path].held().values.view(torch.uint8)[row, column] ^= 1

    def spoil_factor_on_arrival(self, path: str) -> None:
        """Have a layer keep another second factor than arrives, from now on; none if the path is empty."""
        self._spoiled_layer = path

    def receive_weights(self, *args: Any) -> Report:
        report = super().receive_weights(*args)
        if self._spoiled_layer:
            layer = self._adapter_manager().modules[self._spoiled_layer]
            layer.lora_b_stacked[0].data[:, 0, 1, 0] += 1e-3
        return report

    def break_forward(self) -> None:
        """Make the next forward pass fail."""

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of order")

        self.get_model().forward = broken
