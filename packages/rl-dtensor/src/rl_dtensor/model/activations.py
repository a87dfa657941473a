"""Memory of the activations that a layer keeps for its backward pass, counted without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rl_core.data.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_core.torch.training.recompute import ActivationsUnknown, LayerActivations
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.kernels import Softmax
from rl_dtensor.model.layout import Layout, Segments
from rl_dtensor.model.recompute import is_kept
from rl_dtensor.parallel.body import body_of


@dataclass
class _Count:
    """Bytes of one layer. What has the width of hidden states lies between blocks, and is whole on tensor-parallel
    ranks unless tokens are split; the rest is split.

    Args:
        width: Width of hidden states.
        tensor_ranks: Ranks that share the inside of blocks.
        splits_tokens: True if they share what lies between blocks too.
    """

    width: int
    tensor_ranks: int
    splits_tokens: bool
    saved: float = 0.0
    products: float = 0.0
    entered: float = 0.0
    _seen: set[int] = field(default_factory=set)
    _alive: list[Tensor] = field(default_factory=list)

    def save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(tensor)  # another storage must not get its address
            self.saved += self._share(tensor, storage.nbytes())

    def product(self, tensor: Tensor) -> None:
        self.products += self._share(tensor, tensor.numel() * tensor.element_size())

    def enter(self, hidden: Tensor) -> None:
        self.entered = self._share(hidden, hidden.numel() * hidden.element_size())

    def result(self) -> LayerActivations:
        entered = round(self.entered)
        # the first operation of a layer keeps its input, and a checkpoint does
        return LayerActivations(max(round(self.saved), entered), round(self.products) + entered, entered)

    def _share(self, tensor: Tensor, num_bytes: int) -> float:
        is_between = bool(tensor.dim()) and tensor.shape[-1] == self.width
        return num_bytes if is_between and not self.splits_tokens else num_bytes / self.tensor_ranks


class _Products(TorchDispatchMode):
    """Counts the results that selective recomputation keeps."""

    def __init__(self, counts: _Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._counts.now is not None and is_kept(func):
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, Tensor):
                    self._counts.now.product(each)
        return result


class _Counts:
    """Counts of layers, one after another."""

    def __init__(self, hf: PreTrainedModel, layers: Sequence[nn.Module], *, tensor_ranks: int, splits_tokens: bool):
        width = hf.config.get_text_config().hidden_size
        self.of_layer = [_Count(width, tensor_ranks, splits_tokens) for _ in layers]
        self.now: _Count | None = None
        self._layers = layers
        self._parameters = {parameter.untyped_storage()._cdata for parameter in hf.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        if self.now is not None and tensor.untyped_storage()._cdata not in self._parameters:
            self.now.save(tensor)
        return tensor

    @contextmanager
    def running(self) -> Iterator[None]:
        def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self.now = self.of_layer[places[id(layer)]]
            self.now.enter(args[0] if args else kwargs["hidden_states"])

        def leave(*_: Any) -> None:
            self.now = None

        places = {id(layer): place for place, layer in enumerate(self._layers)}
        hooks = []
        for layer in self._layers:
            hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            hooks.append(layer.register_forward_hook(leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor), _Products(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def activations_of(
    hf: PreTrainedModel, layers: Sequence[nn.Module], *, tensor_ranks: int, splits_tokens: bool
) -> list[LayerActivations]:
    """Count what each layer keeps, by a forward pass of one token on `meta`.

    Args:
        hf: Whole model on `meta` in the dtype that it computes in.
        layers: Its repeated layers.
        tensor_ranks: Ranks that share the inside of each layer.
        splits_tokens: True if they share the tokens between blocks too.

    Raises:
        ActivationsUnknown: If the model's code needs data.
    """
    counts = _Counts(hf, layers, tensor_ranks=tensor_ranks, splits_tokens=splits_tokens)

    def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        out: Tensor = _Attention.apply(query, key, value)
        if counts.now is not None:
            counts.now.product(out)
        return out

    place = torch.zeros(1, 1, dtype=torch.long, device="meta")
    inputs = {"input_ids": place, "attention_mask": torch.ones_like(place)}
    if hf.config.get_text_config()._attn_implementation == ROWS:
        layout = Layout(
            Rows(place[0], {TOKENS: place[0]}), place, place, place[0], None, bounds=((0, 1),), length=1, context=None
        )
        inputs |= {"position_ids": place, "layout": layout, "attend": attend}
    was_training = hf.training
    hf.train()
    try:
        with torch.enable_grad(), counts.running():
            body_of(hf)(**inputs, use_cache=False)
    except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # of the family's code
        raise ActivationsUnknown(f"{type(error).__name__}: {error}") from error
    finally:
        hf.train(was_training)
    return [count.result() for count in counts.of_layer]


class _Attention(torch.autograd.Function):
    """Keeps what flash attention keeps: its inputs, its results and a number per token and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise NotImplementedError("only counted")
