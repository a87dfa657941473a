"""The adapters of one weight version on their way into one rank of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.utils import parse_fine_tuned_lora_name

from rl_core.errors import WeightSyncError
from rl_core.torch.training.lora import LORA_A, LORA_B
from rl_core.weights import Manifest


@dataclass(frozen=True)
class EngineFactor:
    """A factor as the engine knows it.

    Args:
        layer: The engine's name of the layer, before layers are fused.
        is_down: True if it is the first of the two, `[dim, inputs]`.
    """

    layer: str
    is_down: bool


class AdapterReceiver:
    """Takes in the factors of one manifest and has this rank's layers apply them, in the place of those before.

    Args:
        manager: Manager of the adapters on this rank's model.
        manifest: Announces the factors.
        scale: Factor of an adapter's product.
    """

    def __init__(self, manager: LoRAModelManager, manifest: Manifest, scale: float) -> None:
        self._manager = manager
        self._version = manifest.version
        self._scale = scale
        self._factors: dict[EngineFactor, Tensor] = {}
        self._announced: dict[str, EngineFactor] = {}
        # the layers that are fused into each layer of the engine: itself alone, if none are
        self._fused = {path: manager.packed_modules.get(path, [path]) for path in manager.modules}
        self.unknown: dict[str, str] = {}
        self.missing: list[str] = []
        self._plan([spec.name for spec in manifest.factors])

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep a factor that arrived; its memory may be reused on return.

        Raises:
            WeightSyncError: If it was not announced.
        """
        if name not in self._announced:
            raise WeightSyncError(f"{name} arrived, which is not a factor of an adapter", (name,))
        self._factors[self._announced[name]] = tensor.to("cpu", self._manager.lora_config.lora_dtype, copy=True)

    def apply(self) -> None:
        """Make the layers apply the adapters from now on, to requests that name this version."""
        layers = dict.fromkeys(factor.layer for factor in self._factors)
        loras = {layer: self._layer_weights(layer) for layer in layers}
        # before the others are added: there is one place on the device
        self._manager.remove_all_adapters()
        self._manager.add_adapter(LoRAModel(self._version, max(lora.rank for lora in loras.values()), loras))
        self._manager.activate_adapter(self._version)

    def stale(self) -> list[str]:
        """Names of the factors that the layers do not apply.

        Raises:
            WeightSyncError: If none have arrived.
        """
        if self._version not in self._manager.lora_index_to_id:
            raise WeightSyncError(f"the adapters of weight version {self._version} were announced but never received")
        place = self._manager.lora_index_to_id.index(self._version)
        names: list[str] = []
        for path, module in self._manager.modules.items():
            if isinstance(module, BaseLinearLayerWithLoRA):
                names += [name for name in self._stale_of(path, module, place) if name not in names]
        return names

    def _plan(self, names: Sequence[str]) -> None:
        model = self._manager.model
        mapper = model.hf_to_vllm_mapper.get_rename_mapper() if hasattr(model, "hf_to_vllm_mapper") else None
        served = {layer for layers in self._fused.values() for layer in layers}
        for name in names:
            if not name.endswith((LORA_A, LORA_B)):
                self.unknown[name] = "it is not a factor of an adapter"
                continue
            factor = EngineFactor(*parse_fine_tuned_lora_name(name, mapper))
            if factor.layer in served:
                self._announced[name] = factor
            else:
                self.unknown[name] = "no layer of the engine takes an adapter under this name"
            other = name.removesuffix(LORA_A) + LORA_B if factor.is_down else name.removesuffix(LORA_B) + LORA_A
            if other not in names:
                self.missing.append(other)

    def _layer_weights(self, layer: str) -> LoRALayerWeights:
        down, up = (self._factors[EngineFactor(layer, is_down)] for is_down in (True, False))
        # vLLM scales the second factor where it lies; its own scale, alpha / rank, gives way to the one given
        return LoRALayerWeights(layer, down.shape[0], 1, down, up.clone(), scaling=self._scale)

    def _stale_of(self, path: str, module: BaseLinearLayerWithLoRA, place: int) -> Iterator[str]:
        """Names of the factors of one layer that differ from what its place on the device holds."""
        layers = self._fused[path]
        for is_down, stacked in ((True, module.lora_a_stacked), (False, module.lora_b_stacked)):
            parts = self._held_by(module, layers, is_down=is_down)
            if not all(_holds(slot[place, 0], part) for slot, part in zip(stacked, parts, strict=True)):
                wrong = {EngineFactor(layer, is_down) for layer in layers}
                yield from (name for name, factor in self._announced.items() if factor in wrong)

    def _held_by(self, module: BaseLinearLayerWithLoRA, layers: Sequence[str], *, is_down: bool) -> list[Tensor | None]:
        """This rank's part of the factors of the layers that are fused into one, one for each part of its output."""
        downs = [self._factors.get(EngineFactor(layer, is_down=True)) for layer in layers]
        ups = [self._scaled(self._factors.get(EngineFactor(layer, is_down=False))) for layer in layers]
        if all(up is None for up in ups):
            return [None] * module.n_slices
        if len(layers) == 1:
            whole = downs[0] if is_down else ups[0]
            if module.tp_size > 1:
                whole = module.slice_lora_a(whole) if is_down else module.slice_lora_b(whole)
            return [whole]
        if len(layers) != module.n_slices:
            downs, ups = module.expand_packed_lora(downs, ups)
        parts = downs if is_down else ups
        if module.tp_size > 1:
            parts = module.slice_lora_a(parts) if is_down else module.slice_lora_b(parts)
        return parts

    def _scaled(self, up: Tensor | None) -> Tensor | None:
        return None if up is None else up * self._scale


def _holds(slot: Tensor, part: Tensor | None) -> bool:
    """Return whether a place on the device, padded with zeros, holds these values."""
    if part is None:
        return not slot.any()
    rows, columns = part.shape
    expected = torch.zeros_like(slot)
    expected[:rows, :columns] = part
    return torch.equal(slot, expected)
