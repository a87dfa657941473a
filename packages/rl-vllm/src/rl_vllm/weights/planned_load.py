"""Loading by plan: tensors go straight to the places that a `LoadPlan` found for them.

vLLM's reload wraps every loader anew for each version and runs it twice, the first time to count. With small layers
or many experts that takes longer than everything else in a weight sync, so a model whose loaders only copy is loaded
without them. The layers are otherwise treated alike: each is filled in the format of its checkpoint, processed by its
own method, and its results are copied into the tensors that kernels and graphs refer to. Tensors that kernels use as a
checkpoint has them are filled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
    get_tensor_load_numel,
)
from vllm.model_executor.models.gemma3_mm import Gemma3MultiModalProjector
from vllm.model_executor.models.interns1_vit import InternS1VisionEmbeddings

from rl_core.torch.transport.bucket import Region
from rl_vllm.patches.expert_layers import packs_experts
from rl_vllm.weights.load_plan import Filling, LoadPiece, LoadPlan
from rl_vllm.weights.quantised_layers import is_quantising

_IS_PROCESSED = "_already_called_process_weights_after_loading"
"""Attribute that keeps vLLM's methods that quantise from doing it twice."""

PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that compute with stacked experts as loaders fill them. Others swap, pad or pack them."""

VISION_LAYERS = (
    ConvLayerBase,
    nn.Conv2d,
    nn.Conv3d,
    nn.Embedding,
    nn.Linear,
    Gemma3MultiModalProjector,
    InternS1VisionEmbeddings,
)
"""Layers of vision towers and projectors with weights of several dimensions that no method processes."""


@dataclass(frozen=True, eq=False)
class PlannedLayer:
    """A layer whose parameters are all known to be filled, as are the buffers that a checkpoint has.

    Args:
        module: Module of the engine's model.
        num_pieces: Copies that fill all its parameters.
        fillings: Attribute to the constant parts of a parameter.
    """

    module: nn.Module
    num_pieces: int
    fillings: Sequence[tuple[str, Filling]]


Reader = Callable[[Region], Tensor]
"""Returns a part of a tensor that has arrived."""
Destination = tuple[PlannedLayer, str, LoadPiece]
"""Destination of one copy of a plan: a layer, the attribute of its parameter, and the copy."""


class PlannedLoad:
    """The load of every layer of a model, by plan.

    Args:
        destinations: Name that a tensor is sent under, to its copies.
        attention: Layers that derive tensors from the others' weights once these are loaded.
        dtype: Dtype of activations.
    """

    def __init__(
        self, destinations: Mapping[str, Sequence[Destination]], attention: Sequence[nn.Module], dtype: torch.dtype
    ) -> None:
        self._destinations = destinations
        self._attention = attention
        self._dtype = dtype

    @classmethod
    def of(cls, model: nn.Module, plan: LoadPlan, dtype: torch.dtype) -> PlannedLoad | None:
        """Return the load; None if some layer's loaders do more than copy, or its method is not a plain one."""
        destinations: dict[str, list[Destination]] = {}
        attention = []
        for path, module in model.named_modules():
            if is_deferred_attention_layer(module):
                attention.append(module)
                if any(_full(path, name) in plan.pieces for name in get_layer_tensors(module)):
                    return None
                continue
            names = _own_tensors(path, module, plan)
            if not names:
                continue
            if not is_plain(module) and not is_quantising(module) and not _stacks_experts(module):
                return None
            # All buffers must be filled in place, except those that a reload leaves alone as well.
            buffers = get_layer_params_buffers(module)[1].keys() - SKIP_LOAD_TENSORS
            keeps_buffers = not _is_processed(module) and all(_full(path, name) in plan.pieces for name in buffers)
            if buffers and not keeps_buffers:
                return None
            if not all(_is_filled(_full(path, name), module, name, plan) for name in names):
                return None
            pieces = [(name, piece) for name in names for piece in plan.pieces[_full(path, name)]]
            fillings = [(name, each) for name in names for each in plan.fillings.get(_full(path, name), ())]
            layer = PlannedLayer(module, len(pieces), fillings)
            for name, piece in pieces:
                destinations.setdefault(piece.source, []).append((layer, name, piece))
        return cls(destinations, attention, dtype)

    def load(self, buckets: Iterable[Iterable[tuple[str, Reader]]]) -> None:
        """Fill all layers with the tensors of one version. After a failure the layers are as the engine needs them,
        with some of the values.

        Args:
            buckets: Buckets of tensors, by the names they are sent under, each with a function that returns a part of
                it. The tensors of a bucket need not last beyond its turn.
        """
        open_layers: dict[PlannedLayer, _OpenLayer] = {}
        try:
            for tensors in buckets:
                for source, read in tensors:
                    for layer, name, piece in self._destinations.get(source, ()):
                        opened = open_layers.get(layer)
                        if opened is None:
                            opened = open_layers[layer] = _OpenLayer(layer)
                        opened.put(name, piece.write, read(piece.read))
                        if not opened.num_left:
                            open_layers.pop(layer).process()
                for opened in open_layers.values():
                    opened.copy()
        finally:
            for opened in open_layers.values():
                opened.put_back()
        for module in self._attention:
            module.process_weights_after_loading(self._dtype)


class _OpenLayer:
    """A layer while it is filled, in its checkpoint's format if a method converts it.

    Attributes:
        num_left: Number of copies that have not been put.
    """

    def __init__(self, layer: PlannedLayer) -> None:
        self._module = module = layer.module
        self._is_processed = _is_processed(module)
        self.num_left = layer.num_pieces
        self._live = get_layer_params_buffers(module)[0]
        if self._is_processed:
            vars(module).pop(_IS_PROCESSED, None)
            info = get_layerwise_info(module)
            restore_layer_on_meta(module, info)
            materialize_layer(module, info)
        self._tensors = {name: tensor.detach() for name, tensor in get_layer_tensors(module).items()}
        self._places: list[Tensor] = []
        self._values: list[Tensor] = []
        for name, filling in layer.fillings:
            filling.write.read(self._tensors[name]).fill_(filling.value)

    def put(self, name: str, write: Region, values: Tensor) -> None:
        """Fill a part of a tensor, not later than `copy`."""
        self._places.append(write.read(self._tensors[name]))
        self._values.append(values)
        self.num_left -= 1

    def copy(self) -> None:
        """Make the copies that are due, in one call: a layer of experts has hundreds."""
        if self._places:
            torch._foreach_copy_(self._places, self._values)
            self._places, self._values = [], []

    def process(self) -> None:
        """Make the layer compute with the copies."""
        self.copy()
        if self._is_processed:
            try:
                with packs_experts(self._module):
                    self._module.quant_method.process_weights_after_loading(self._module)
                made = get_layer_params_buffers(self._module)[0]
                for name, live in self._live.items():
                    live.data.copy_(made[name].detach())
            finally:
                self.put_back()

    def put_back(self) -> None:
        """Give the layer back the tensors that it had."""
        if not self._is_processed:
            return
        for name in get_layer_params_buffers(self._module)[0]:
            delattr(self._module, name)
        for name, parameter in self._live.items():
            self._module.register_parameter(name, parameter)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer computes with its weights as they are, or with a copy that is packed but not quantised."""
    if isinstance(layer, LinearBase | VocabParallelEmbedding):
        return isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    if isinstance(layer, VISION_LAYERS):
        return True
    return all(parameter.ndim == 1 for parameter in layer.parameters(recurse=False))


def _stacks_experts(layer: nn.Module) -> bool:
    """Return whether a layer holds the weights of experts, stacked and not quantised."""
    return isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod)


def _is_processed(layer: nn.Module) -> bool:
    """Return whether a method makes the tensors that a layer computes with from the loaded ones."""
    if _stacks_experts(layer):
        return layer.quant_method.unquantized_backend not in PLAIN_EXPERTS
    return isinstance(layer, LinearBase | VocabParallelEmbedding)


def _own_tensors(path: str, module: nn.Module, plan: LoadPlan) -> list[str]:
    """Return the parameters of a layer as a checkpoint fills them, except parameters that an earlier layer shares, and
    the buffers that it fills. The layer itself makes the scales if it quantises."""
    recorded = get_layerwise_info(module).restore_metadata[0]
    parameters, buffers = get_layer_params_buffers(module)
    if is_quantising(module):
        parameters = {name: tensor for name, tensor in parameters.items() if name in recorded or name == "bias"}
    filled = {name for name in buffers if _full(path, name) in plan.pieces}
    return [name for name in sorted({*recorded, *parameters, *filled}) if _full(path, name) not in plan.aliases]


def _is_filled(full: str, module: nn.Module, name: str, plan: LoadPlan) -> bool:
    """Return whether copies and constants fill a tensor, in the place where the layer then has it."""
    if full in plan.opaque or full not in plan.pieces:
        return False
    of_parameters, of_buffers = get_layerwise_info(module).restore_metadata
    recorded = of_parameters.get(name, of_buffers.get(name))
    held = get_layer_tensors(module).get(name)
    if recorded is not None and _is_processed(module):
        num_values = get_tensor_load_numel(recorded)
    elif held is not None and held.is_contiguous() and (recorded is None or recorded.shape == held.shape):
        num_values = held.numel()  # It is filled in place.
    else:
        return False
    parts = [*plan.pieces[full], *plan.fillings.get(full, ())]
    return sum(prod(part.write.size) for part in parts) == num_values


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
