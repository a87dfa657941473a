"""Layers compiled by `torch.compile`, each in two graphs: from its input to attention, and from there to its output.

Matrix products, adapters, 8-bit casts and the collectives of tensor parallelism are inside the graphs. Attention stays
outside, because its kernels and the exchange of context-parallel ranks depend on the rows of a microbatch, and so do
experts, whose exchange waits for sizes. FSDP gathers and frees parameters around a layer, as without compilation.

The parts are not cut out of the code of a family: each graph traces the whole layer. The first returns the arguments of
attention, so what follows is dead code in it. The second takes the result of attention, so what leads to it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rl_dtensor.model.attention import Seam, row_attention
from rl_dtensor.model.kernels import MAX_VARIANTS
from rl_dtensor.model.layers import formulas
from rl_dtensor.model.layers.recompute import products_kept
from rl_dtensor.parallel.experts import expert_modules

logger = logging.getLogger(__name__)

ERRORS = (TorchDynamoException, ConstraintViolationError)
"""Errors of code that cannot be compiled for all numbers of tokens."""

Given = Mapping[str, Any]
"""Arguments of a layer in addition to its hidden states, without the layout of rows and the kernel of attention."""


def compile_layers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> int:
    """Make layers run compiled code, made when they first run, once for all numbers of tokens and all layers of a kind.

    To be called before the model is split or sharded, which wraps the computation of modules.

    Args:
        hf: Whole model on `meta` or with values, changed in place.
        layers: The repeated layers.

    Returns:
        Number of layers that are compiled. Layers with experts are left as they are if their code is not the code of
        most families, which shows where experts begin.

    Raises:
        ValueError: If nothing can be compiled on this machine.
    """
    problem = compiler_problem()
    if problem:
        raise ValueError(problem)
    experts = {id(module) for module in expert_modules(hf)}
    to_attention, from_attention = _Part("up to attention", _to_attention), _Part("after attention", _from_attention)
    count = 0
    for layer in layers:
        kind: Any = type(layer)
        has_experts = any(id(part) in experts for part in layer.modules())
        if "forward" not in vars(layer) and (not has_experts or formulas.is_pre_norm_layer(kind)):
            cast("Any", layer).forward = CompiledLayer(layer, to_attention, from_attention, has_experts=has_experts)
            count += 1
    logger.info("compiled in %s: %d of %d layers", type(hf).__name__, count, len(layers))
    return count


class CompiledLayer:
    """The forward pass of a layer in two compiled parts, with attention between them and experts after them.

    Args:
        layer: Layer, not yet split or sharded.
        to_attention: Part that is shared by all layers, from hidden states to the arguments of attention.
        from_attention: Shared part from the result of attention to the output, or to the input of experts.
        has_experts: True if the layer has experts, and the code of most families.

    Attributes:
        selective: Checkpoint of the layer that recomputes selectively; None if it keeps everything. The parts then
            recompute within their graphs, and it is used for what stays outside.
    """

    def __init__(self, layer: nn.Module, to_attention: _Part, from_attention: _Part, *, has_experts: bool) -> None:
        self._layer: Any = layer
        self._original = layer.forward
        self._to_attention, self._from_attention = to_attention, from_attention
        self._has_experts = has_experts
        self.selective: Callable[..., Any] | None = None

    def __call__(self, hidden_states: Tensor, *, layout: Any = None, attend: Any = None, **given: Any) -> Any:
        """Compute the layer as its own code does, by that code if it cannot be compiled."""
        kind = type(self._layer)
        selects = self.selective is not None and torch.is_grad_enabled()
        around = self.selective if selects and self.selective is not None else _called
        if attend is not None and kind not in self._to_attention.refused:
            try:
                return self._in_parts(hidden_states, layout, attend, given, around, selects=selects)
            except ERRORS as error:
                self._to_attention.refuse(kind, error)
        rows = {} if attend is None else {"layout": layout, "attend": attend}
        return around(partial(self._original, **rows, **given), hidden_states)

    def _in_parts(
        self, hidden: Tensor, layout: Any, attend: Any, given: Given, around: Callable[..., Any], *, selects: bool
    ) -> Any:
        layer = self._layer
        if not torch.is_grad_enabled():
            hidden = hidden.detach()  # The input of the first layer may ask for a gradient, and would be a variant.
        # Ranks that split the tokens of a row may have one each, and then the number of all of them is a constant too.
        has_several = hidden.shape[1] > 1
        if has_several:
            for each in given.values():
                for part in each if isinstance(each, tuple) else (each,):
                    _mark(part)
        _mark(hidden)
        (query, key, value), options = self._to_attention(layer, hidden, given, selects, self._has_experts)
        attended, _ = row_attention(layer, query, key, value, None, layout=layout, attend=attend, **options)
        if has_several:
            _mark(attended)
        out = self._from_attention(layer, hidden, attended, given, selects, self._has_experts)
        if not self._has_experts:
            return out
        normed, residual = out
        return residual + around(layer.mlp, normed)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _mark(tensor: Any) -> None:
    """Compile for all numbers of rows and tokens, the first two dims; a size of 1 is always compiled as a constant."""
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_dynamo_dynamic_indices"):
        torch._dynamo.mark_dynamic(tensor, [dim for dim, size in enumerate(tensor.shape[:2]) if size > 1])


def _to_attention(layer: Any, hidden: Tensor, given: Given, selects: bool, has_experts: bool) -> Any:
    """Return queries, keys and values of a layer, and the other arguments of its attention."""

    def compute(hidden: Tensor) -> Any:
        seam = Seam()
        if has_experts:  # Their exchange cannot be traced, even as dead code.
            layer.self_attn(hidden_states=layer.input_layernorm(hidden), attend=seam, **given)
        else:
            type(layer).forward(layer, hidden, attend=seam, **given)
        return seam.heads, seam.options

    return checkpoint(compute, hidden, use_reentrant=False, context_fn=products_kept) if selects else compute(hidden)


def _from_attention(
    layer: Any, hidden: Tensor, attended: Tensor, given: Given, selects: bool, has_experts: bool
) -> Any:
    """Return the output of a layer from the result of its attention; with experts, their input and the residual."""

    def compute(hidden: Tensor, attended: Tensor) -> Any:
        seam = Seam(attended)
        if not has_experts:
            return type(layer).forward(layer, hidden, attend=seam, **given)
        projected, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), attend=seam, **given)
        residual = hidden + projected
        return layer.post_attention_layernorm(residual), residual

    if selects:
        return checkpoint(compute, hidden, attended, use_reentrant=False, context_fn=products_kept)
    return compute(hidden, attended)


class _Part:
    """A compiled function of all layers, which logs the time that compiling takes.

    Attributes:
        refused: Kinds of layers that cannot be compiled.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        to_graph: Any = torch.compile  # It is declared without `recompile_limit`.
        self._name, self._run = name, to_graph(function, fullgraph=True, recompile_limit=MAX_VARIANTS)
        self._known: set[tuple[Any, ...]] = set()
        self.refused: set[type[nn.Module]] = set()

    def __call__(self, layer: nn.Module, *args: Any) -> Any:
        known = (type(layer), torch.is_grad_enabled())
        if known in self._known:
            return self._run(layer, *args)
        kind, aim = type(layer).__name__, "training" if torch.is_grad_enabled() else "reading"
        logger.info("compiling %s %s, for %s", kind, self._name, aim)
        start = time.monotonic()
        found = self._run(layer, *args)
        self._known.add(known)
        logger.info("compiled %s %s, for %s, in %.1f s", kind, self._name, aim, time.monotonic() - start)
        return found

    def refuse(self, kind: type[nn.Module], error: Exception) -> None:
        """Leave layers of a kind to their own code."""
        self.refused.add(kind)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        logger.warning(
            "%s is not compiled and computes by its own code, without fused kernels (%s: %s); set "
            "dtensor_cfg.compile=false",
            kind.__name__,
            type(error).__name__,
            lines[0] if lines else "no reason",
        )


@cache
def compiler_problem() -> str:
    """Return why nothing can be compiled on this machine, which compiling a sum shows; empty if it can."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(lambda x: x + x)(torch.ones(2, device=device))
    except Exception as error:  # noqa: BLE001  # Compilers and drivers raise any error.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (
            "dtensor_cfg.compile needs a C++ compiler that works, and compiling a sum gave "
            f"{type(error).__name__}: {lines[0] if lines else 'no reason'}; install g++ (or set CXX), or set "
            "compile=false"
        )
    return ""
