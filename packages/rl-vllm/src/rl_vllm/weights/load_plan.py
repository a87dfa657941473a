"""Plan of a load: the part of each engine parameter or buffer that each tensor of a checkpoint fills.

The engine's own loaders are run over tensors without data while their copies are recorded instead of executed. The
result holds for fused projections, tensor-parallel shards, replicated heads and padded vocabularies alike, without a
table of model families.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import utils
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, restore_layer_on_meta

from rl_core.torch.transport.bucket import Parts, Region, parts_to_send
from rl_core.weights import Manifest, TensorSpec
from rl_vllm.patches.head_bias import keep_head_bias
from rl_vllm.patches.siglip_names import unused_names

LOADER_ERRORS = (KeyError, ValueError, AttributeError, AssertionError, RuntimeError, TypeError, IndexError)
"""Errors of vLLM's loaders for a tensor that they do not know, or of the wrong shape."""

NOT_TAKEN = "no parameter takes it"
"""Reason of an unknown tensor that every loader skipped. Other reasons are errors of loaders."""

SCALARS = ((), (1,))
"""Shapes of tensors whose value loaders read."""

MADE_BUFFERS = SKIP_LOAD_TENSORS - {"e_score_correction_bias"}
"""Names of buffers that the engine makes itself and keeps in its state. The exception is a tensor that vLLM's reload
leaves where it is, as it does these, but that checkpoints have."""


@dataclass(frozen=True)
class LoadPiece:
    """One copy that loading makes.

    Args:
        name: Hugging Face name of the tensor it belongs to.
        source: Name it is sent under, which differs for a tied tensor.
        read: Part of it that is read.
        write: Part of the engine's parameter that is written.
    """

    name: str
    source: str
    read: Region
    write: Region


class Filling(NamedTuple):
    """One value that loading writes everywhere in a part of a parameter, such as the padding of a vocabulary.

    Args:
        write: Part of the engine's parameter that is written.
        value: Value that is written there.
    """

    write: Region
    value: float


@dataclass
class LoadPlan:
    """The load of one manifest into one rank of an engine.

    Buffers that checkpoints fill (`layer_scalar` of Gemma 4) count as parameters.

    Args:
        pieces: Engine parameter to the copies that fill it.
        fillings: Engine parameter to the values that are written into the rest of it.
        aliases: Second names of engine parameters (a tied head), to the first name.
        opaque: Engine parameters whose loader computes more than copies.
        unfed: Tied names that the engine has no parameter of (a model of vLLM whose head is its embedding); their
            tensor is loaded only under its own name.
        unknown: Tensors that no loader of this rank took, to the reason.
        missing: Hugging Face names of tensors that parameters of this rank need and the manifest does not have.
    """

    pieces: dict[str, list[LoadPiece]] = field(default_factory=dict)
    fillings: dict[str, list[Filling]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    unfed: set[str] = field(default_factory=set)
    unknown: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def parts(self, manifest: Manifest) -> Parts:
        """Return the parts of the tensors that this rank keeps; everything if a loader computes more than copies."""
        if self.opaque:
            return {}
        read: dict[str, list[Region]] = {spec.name: [] for spec in manifest.tensors if spec.shape not in SCALARS}
        for pieces in self.pieces.values():
            for piece in pieces:
                if piece.source in read:
                    read[piece.source].append(piece.read)
        return parts_to_send(read, {spec.name: spec.shape for spec in manifest.tensors})


def fed_names(manifest: Manifest) -> dict[str, list[str]]:
    """Return the name of each tensor sent to the names it is loaded under: its own and the tied ones."""
    names = {spec.name: [spec.name] for spec in manifest.tensors}
    for tied, source in manifest.tied.items():
        names.setdefault(source, []).append(tied)
    return names


def plan_load(model: nn.Module, manifest: Manifest) -> LoadPlan:
    """Dry-run the model's loaders over a manifest; the model is left as it was, except a bias of its head that only
    the manifest has."""
    keep_head_bias(model, manifest)
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _named_tensors(model):
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    for parameter in model.parameters():
        # vLLM 0.32 reads the name of a loader in its reload. Loaders that are partial functions (MiniMax-M2's norms of
        # queries) have none. This can go once vLLM does not read it.
        loader = vars(parameter).get("weight_loader")
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            loader.__name__ = "partial"  # type: ignore[attr-defined]  # partial functions have attributes
    with _checkpoint_format(model):
        recorder = _CopyRecorder(model)
        refused = recorder.feed(model, manifest)
        plan = LoadPlan(recorder.pieces, recorder.fillings, aliases, recorder.opaque)
        sent = [spec.name for spec in manifest.tensors]
        taken = {piece.name for pieces in plan.pieces.values() for piece in pieces} | recorder.touched
        plan.unfed = refused.keys() & manifest.tied.keys()
        unknown = {name: NOT_TAKEN for name in sent if name not in taken}
        unknown |= {name: reason for name, reason in refused.items() if name not in plan.unfed}
        unused = unused_names(model, sent)
        plan.unknown = {name: reason for name, reason in unknown.items() if name not in unused}
        for alias, original in aliases.items():
            if alias not in plan.pieces and original in plan.pieces:
                plan.pieces[alias] = [replace(piece, name=alias) for piece in plan.pieces[original]]
        plan.missing = _missing(model, recorder.numel, aliases, sent)
    return plan


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def _checkpoint_format(model: nn.Module) -> Iterator[None]:
    """Give the model parameters as its loaders expect them, without data; put the live ones back unchanged."""
    live = [
        (layer, utils.get_layer_params_buffers(layer), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    for layer, _, _ in live:
        restore_layer_on_meta(layer, get_layerwise_info(layer))
        for tensor in utils.get_layer_tensors(layer).values():
            # A reload leaves its own wrapper, which then does nothing, on the tensors it restores.
            tensor.weight_loader = _get_original_loader(tensor)
    try:
        yield
    finally:
        for layer, (parameters, buffers), non_persistent in live:
            for name in utils.get_layer_tensors(layer):
                delattr(layer, name)
            for name, parameter in parameters.items():
                layer.register_parameter(name, parameter)
            for name, buffer in buffers.items():
                layer.register_buffer(name, buffer, persistent=name not in non_persistent)


class _CopyRecorder(TorchDispatchMode):
    """Records copies into a model's parameters and buffers instead of making them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters: dict[int, str] = {}
        for name, tensor in _named_tensors(model):
            # A layer that has two names, such as shared experts that a runner holds too, goes by the first.
            self._parameters.setdefault(_storage(tensor), name)
        self._sources: dict[int, tuple[str, TensorSpec]] = {}
        self._alive: list[Tensor] = []
        self._last = ""
        self.pieces: dict[str, list[LoadPiece]] = {}
        self.fillings: dict[str, list[Filling]] = {}
        self.opaque: set[str] = set()
        self.touched: set[str] = set()
        self.numel: dict[str, int] = {}

    def feed(self, model: nn.Module, manifest: Manifest) -> dict[str, str]:
        """Load everything, and return the tensors that a loader refused, to its reason."""
        names = fed_names(manifest)
        todo = [(name, spec) for spec in manifest.tensors for name in names[spec.name]]
        refused: dict[str, str] = {}
        while todo:
            self._last = ""
            try:
                with self:
                    model.load_weights(self._tensors(todo))
                break
            except LOADER_ERRORS as error:
                names_left = [name for name, _ in todo]
                if self._last not in names_left:
                    raise
                refused[self._last] = str(error) or type(error).__name__
                todo = todo[names_left.index(self._last) + 1 :]
        return refused

    def _tensors(self, todo: Sequence[tuple[str, TensorSpec]]) -> Iterator[tuple[str, Tensor]]:
        for name, spec in todo:
            # Loaders read the value of a scalar, so it has one.
            device = "cpu" if spec.shape in SCALARS else "meta"
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            self._alive.append(tensor)
            self._sources[_storage(tensor)] = (name, spec)
            self._last = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_tensor = bool(args) and isinstance(args[0], Tensor)
        parameter = self._parameters.get(_storage(args[0])) if is_tensor else None
        if parameter is None:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if func is torch.ops.aten.copy_.default:
            self._record(parameter, target, args[1])
            return target
        if func in _FILLS:
            self.numel[parameter] = self.numel.get(parameter, 0) + target.numel()
            self.touched.add(self._last)
            value = args[1] if len(args) > 1 else 0.0
            if isinstance(value, int | float):
                self.fillings.setdefault(parameter, []).append(Filling(Region.of(target), value))
            else:
                self.opaque.add(parameter)
            return target
        if func._schema.is_mutable:
            self.opaque.add(parameter)
        return func(*args, **(kwargs or {}))

    def _record(self, parameter: str, target: Tensor, value: Tensor) -> None:
        self.touched.add(self._last)
        source = self._sources.get(_storage(value))
        if source is None or value.dtype != getattr(torch, source[1].dtype):
            self.opaque.add(parameter)
        else:
            name, spec = source
            if target.shape != value.shape:
                raise ValueError(f"{name}: shape {tuple(value.shape)}, expected {tuple(target.shape)}")
            self.touched.add(name)
            piece = LoadPiece(name, spec.name, Region.of(value), Region.of(target))
            self.pieces.setdefault(parameter, []).append(piece)
        self.numel[parameter] = self.numel.get(parameter, 0) + target.numel()


_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _missing(model: nn.Module, numel: Mapping[str, int], aliases: Mapping[str, str], sent: Iterable[str]) -> list[str]:
    """Return the Hugging Face names of the tensors that parameters need and that are not sent."""
    sent = set(sent)
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    missing: list[str] = []
    for path, layer in model.named_modules():
        if is_deferred_attention_layer(layer):
            continue  # A checkpoint need not have its scales.
        parameters, buffers = utils.get_layer_params_buffers(layer)
        unsaved = layer._non_persistent_buffers_set | MADE_BUFFERS
        saved = {name: buffer for name, buffer in buffers.items() if name not in unsaved}
        for attribute, tensor in (*parameters.items(), *saved.items()):
            name = f"{path}.{attribute}" if path else attribute
            filled = max(numel.get(name, 0), numel.get(aliases.get(name, name), 0))
            if filled < utils.get_tensor_load_numel(tensor):
                # Several tensors of a checkpoint may be fused into one parameter.
                parent, _, module = path.rpartition(".")
                prefix = f"{parent}." if parent else ""
                names = [f"{prefix}{part}.{attribute}" for part in fused.get(module, [module])]
                missing += [each for each in names if each not in sent] or [name]
    return missing
