"""A worker extension with which tests damage an engine's weights."""

from __future__ import annotations

from typing import Any

from rl_core.weights import Manifest
from rl_vllm.engine_worker import EngineWorker
from rl_vllm.weight_receiver import WeightReceiver


class SpoilableWorker(EngineWorker):
    """Remembers the packed copy of the head from before a sync, to put it back afterwards."""

    _packed_head: Any = None

    def make_receiver(self, manifest: Manifest) -> WeightReceiver:
        self._packed_head = self.get_model().lm_head.cpu_linear
        return super().make_receiver(manifest)

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

    def break_forward(self) -> None:
        """Make the next forward pass fail."""

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of order")

        self.get_model().forward = broken
