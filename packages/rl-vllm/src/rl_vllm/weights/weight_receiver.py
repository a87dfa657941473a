"""One weight version, and its adapters, on their way into one rank of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_core.errors import WeightSyncError
from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import LORA_A, LORA_B, size_of
from rl_core.torch.transport.bucket import Region
from rl_core.weights import Manifest
from rl_vllm.patches.direct_copies import keeps_direct_copies
from rl_vllm.patches.expert_layers import packs_experts
from rl_vllm.weights.load_plan import LoadPlan, fed_names
from rl_vllm.weights.planned_load import PlannedLoad, Reader
from rl_vllm.weights.probe import WeightProbe
from rl_vllm.weights.quantised_layers import QuantisationCheck

EngineFactor = tuple[str, bool]
"""A factor as the engine knows it: its name of the layer before layers are fused, and True for the first of the two
factors, `[dim, inputs]`."""


class WeightReceiver:
    """Takes in and checks the weights of one manifest.

    Args:
        model: This rank's part of the engine's model.
        model_config: Config of vLLM.
        manifest: Manifest of only the weights, without factors of adapters.
        plan: Plan of the load into this rank's model.
        planned: That load, if the plan is sufficient for it.
        uses_oracle: Compare quantised weights in float64 with those that arrived.

    Attributes:
        parts: Parts of the tensors that this rank keeps.
        quantisation: Check of the weights that layers quantise.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        manifest: Manifest,
        plan: LoadPlan,
        planned: PlannedLoad | None,
        *,
        uses_oracle: bool = False,
    ) -> None:
        self._model, self._model_config, self._manifest = model, model_config, manifest
        self.plan, self._planned = plan, planned
        self.parts = plan.parts(manifest)
        self._probe: WeightProbe | None = None
        self.quantisation = QuantisationCheck(model, manifest.version, uses_oracle=uses_oracle)

    @property
    def loads_parts(self) -> bool:
        """Return whether parts of tensors are enough for `load_parts`; otherwise `load` needs tensors as a whole."""
        return self._planned is not None

    def load_parts(self, buckets: Iterable[Iterable[tuple[str, Reader]]]) -> None:
        """Load the weights as they arrive, straight to their places; see `PlannedLoad.load`."""
        assert self._planned is not None, "loads_parts shows it"
        self._probe = probe = WeightProbe(self._model, self.plan, self._manifest.version)

        def sampled(tensors: Iterable[tuple[str, Reader]]) -> Iterator[tuple[str, Reader]]:
            for source, read in tensors:
                probe.take(source, read)
                yield source, read

        with self.quantisation.watching():
            self._planned.load(map(sampled, buckets))
        self.repack_tied()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the weights as they arrive, by the names that they are sent under; each lasts until its turn is over."""
        if self._planned is not None:
            self.load_parts([(source, partial(_read, tensor))] for source, tensor in tensors)
            return
        self._probe = probe = WeightProbe(self._model, self.plan, self._manifest.version)

        def sampled() -> Iterator[tuple[str, Tensor]]:
            for source, tensor in tensors:
                probe.take(source, partial(_read, tensor))
                yield source, tensor

        with self.quantisation.watching(), packs_experts(self._model):
            initialize_layerwise_reload(self._model)
            with keeps_direct_copies(self._model):
                try:
                    self._model.load_weights(self._kept(sampled()))
                finally:
                    # Also after a failure, the engine must be able to load the next version.
                    finalize_layerwise_reload(self._model, self._model_config)
        self.repack_tied()

    def _kept(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under every name that this rank loads them under."""
        names = fed_names(self._manifest)
        for source, tensor in tensors:
            # Loaders keep a tensor until its layer is complete, the transport only until its next bucket.
            kept = tensor.clone(memory_format=torch.contiguous_format)
            for name in names[source]:
                if name not in self.plan.unfed:
                    yield name, kept

    def repack_tied(self) -> None:
        """Pack tied heads again: some loaders skip them, and on CPU they compute with their own packed copy."""
        owner: dict[int, nn.Module] = {}
        for layer in self._model.modules():
            if isinstance(layer, VocabParallelEmbedding) and owner.setdefault(id(layer.weight), layer) is not layer:
                layer.quant_method.process_weights_after_loading(layer)

    def stale(self) -> list[str]:
        """Return the Hugging Face names of the tensors that this rank does not compute with.

        Raises:
            WeightSyncError: If nothing was received, or if layers do not hold the values that their recipe of
                quantisation makes of the received weights, with their names.
        """
        if self._probe is None:
            raise WeightSyncError(f"weight version {self._manifest.version} was announced but never received")
        faults = self.quantisation.faults()
        if faults:
            reasons = "; ".join(f"{path} ({', '.join(found)})" for path, found in faults.items())
            text = f"weight version {self._manifest.version}: quantised weights are wrong in {reasons}"
            weights = [self.plan.pieces.get(f"{path}.weight", ()) for path in faults]
            names = [name for pieces in weights for name in dict.fromkeys(piece.name for piece in pieces)]
            raise WeightSyncError(text, tuple(names))
        return self._probe.stale()


class AdapterReceiver:
    """Takes in the factors of one manifest and makes this rank's layers apply them in place of earlier ones.

    Args:
        manager: Manager of the adapters on this rank's model.
        manifest: Announces the factors.
        lora: Settings of the adapters, which determine the scales of their products.

    Attributes:
        unknown: Tensors that are not factors, or that no layer takes, to the reason.
        missing: Factors that belong to announced ones and were not announced.
    """

    def __init__(self, manager: LoRAModelManager, manifest: Manifest, lora: LoraConfig) -> None:
        self._manager = manager
        self._version = manifest.version
        self._scales: dict[str, float] = {}
        self._factors: dict[EngineFactor, Tensor] = {}
        self._announced: dict[str, EngineFactor] = {}
        # Layers that are fused into each layer of the engine; the layer itself, if none are.
        self._fused = {path: manager.packed_modules.get(path, [path]) for path in manager.modules}
        self.unknown: dict[str, str] = {}
        self.missing: list[str] = []
        model, names = manager.model, [spec.name for spec in manifest.factors]
        mapper = model.hf_to_vllm_mapper.get_rename_mapper() if hasattr(model, "hf_to_vllm_mapper") else None
        served = {layer for layers in self._fused.values() for layer in layers}
        for name in names:
            if not name.endswith((LORA_A, LORA_B)):
                self.unknown[name] = "it is not a factor of an adapter"
                continue
            layer, is_down = parse_fine_tuned_lora_name(name, mapper)
            if layer in served:
                self._announced[name] = (layer, is_down)
                self._scales[layer] = size_of(name.removesuffix(LORA_A).removesuffix(LORA_B), lora).scale
            else:
                self.unknown[name] = "no layer of the engine takes an adapter under this name"
            other = name.removesuffix(LORA_A) + LORA_B if is_down else name.removesuffix(LORA_B) + LORA_A
            if other not in names:
                self.missing.append(other)

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
        loras = {}
        for layer in dict.fromkeys(layer for layer, _ in self._factors):
            down, up = self._factors[layer, True], self._factors[layer, False]
            # vLLM scales the second factor in place. Its own scale, alpha / rank, gives way to the given one.
            loras[layer] = LoRALayerWeights(layer, down.shape[0], 1, down, up.clone(), scaling=self._scales[layer])
        # The earlier ones go first: there is one place on the device, which requests that name an adapter do not take.
        self._manager.remove_all_adapters()
        self._manager.add_adapter(LoRAModel(self._version, max(lora.rank for lora in loras.values()), loras))
        self._manager.pin_adapter(self._version)

    def stale(self) -> list[str]:
        """Return the names of the factors that the layers do not apply.

        Raises:
            WeightSyncError: If none have arrived.
        """
        if self._version not in self._manager.lora_index_to_id:
            raise WeightSyncError(f"the adapters of weight version {self._version} were announced but never received")
        place = self._manager.lora_index_to_id.index(self._version)
        names: list[str] = []
        for path, module in self._manager.modules.items():
            if not isinstance(module, BaseLinearLayerWithLoRA):
                continue
            layers = self._fused[path]
            for is_down, stacked in ((True, module.lora_a_stacked), (False, module.lora_b_stacked)):
                parts = self._parts_of(module, layers, is_down=is_down)
                if not all(_holds(slot[place, 0], part) for slot, part in zip(stacked, parts, strict=True)):
                    wrong = {(layer, is_down) for layer in layers}
                    found = [name for name, factor in self._announced.items() if factor in wrong]
                    names += [name for name in found if name not in names]
        return names

    def _parts_of(
        self, module: BaseLinearLayerWithLoRA, layers: Sequence[str], *, is_down: bool
    ) -> list[Tensor | None]:
        """Return this rank's part of the factors of the layers that are fused into one, for each part of its output."""
        downs = [self._factors.get((layer, True)) for layer in layers]
        plain = [self._factors.get((layer, False)) for layer in layers]
        ups = [None if up is None else up * self._scales[layer] for layer, up in zip(layers, plain, strict=True)]
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


def _read(tensor: Tensor, region: Region) -> Tensor:
    return region.read(tensor)


def _holds(slot: Tensor, part: Tensor | None) -> bool:
    """Return whether a place on the device, padded with zeros, holds these values."""
    if part is None:
        return not slot.any()
    rows, columns = part.shape
    expected = torch.zeros_like(slot)
    expected[:rows, :columns] = part
    return torch.equal(slot, expected)
