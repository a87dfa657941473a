"""Stacked experts of `transformers` models that compute on rows grouped by expert, and shared experts next to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear

from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.swiglu import swiglu_of_halves
from rl_dtensor.model.layers.formulas import has_plain_gate
from rl_dtensor.parallel.dispatch import Compute, Dispatch, Grouped, group_tokens, nothing
from rl_dtensor.parallel.experts import check_stacked, expert_modules

NAMES = ("shared_expert", "shared_experts")
"""Names that families have for the experts of every token, next to the experts that a router chooses."""


def fuse_experts(hf: PreTrainedModel) -> int:
    """Make stacked experts group tokens and gate by the kernels of `rl_core.torch.kernels` where these run.

    Their code in `transformers` sorts copies of the tokens by expert, and its results back.

    Returns:
        Number of these modules.
    """
    modules = [module for module in expert_modules(hf) if _is_grouped(module)]
    gated = _with_plain_gates(modules)
    for module in modules:
        _group_here(module, partial(_outputs, module, fuses_gate=id(module) in gated))
    return len(modules)


def dispatch_experts(hf: PreTrainedModel, dispatch: Dispatch, *, fused: bool) -> None:
    """Make stacked experts compute on the tokens that a dispatcher brings them, and shared experts meanwhile.

    To be called before the model gets adapters or is split, which wrap the computation of modules.

    Args:
        hf: Whole model on `meta`, changed in place.
        dispatch: Brings the tokens of a layer to their experts.
        fused: True to gate by kernels where these run.

    Raises:
        ValueError: If a module's experts cannot be split.
    """
    modules = expert_modules(hf)
    for module in modules:
        check_stacked(module, hf.config.model_type)
    gated = _with_plain_gates([module for module in modules if _is_grouped(module)]) if fused else set()
    parents = {id(child): parent for parent in hf.modules() for child in parent.children()}
    for module in modules:
        compute: Compute
        if _is_grouped(module):
            compute = partial(_outputs, module, fuses_gate=id(module) in gated)
        else:
            compute = partial(_outputs_row_by_row, module.forward)
        shared = early_part(parents[id(module)])
        _compute_dispatched(module, dispatch, compute, nothing if shared is None else shared.compute)


def _is_grouped(module: nn.Module) -> bool:
    """Return whether a module computes by one of the implementations of experts in `transformers`, which group rows."""
    return {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys()


def _with_plain_gates(modules: Sequence[nn.Module]) -> set[int]:
    """Return the identities of the modules whose gates kernels compute."""
    tried: dict[Any, bool] = {}
    found = set()
    for module in modules:
        kind = (type(module), str(vars(module).get("act_fn") or module._modules.get("act_fn")))
        if kind not in tried:
            tried[kind] = has_plain_gate(module)
        if tried[kind]:
            found.add(id(module))
    return found


def _group_here(module: Any, compute: Compute) -> None:
    original = module.forward

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not takes(hidden, weights):
            return cast("Tensor", original(hidden, ids, weights))
        grouped = group_tokens(hidden, ids, weights, module.num_experts)
        return grouped.combine(compute(grouped))

    module.forward = forward


def _compute_dispatched(module: Any, dispatch: Dispatch, compute: Compute, meanwhile: Callable[[], None]) -> None:
    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return dispatch(hidden, ids, weights, module.num_experts, compute, meanwhile)

    module.forward = forward


def _outputs(module: Any, grouped: Grouped, *, fuses_gate: bool) -> Tensor:
    """Return the weighted outputs of experts that `transformers` computes by grouped products.

    The weights multiply the activations, which the backward pass has anyway. If the last product of the experts has a
    bias, they multiply its result instead.
    """
    rows, ends, weights = grouped.rows, grouped.ends, grouped.weights[:, None]
    experts = _experts_of_rows(grouped) if module.has_bias else None

    def product(x: Tensor, name: str) -> Tensor:
        bias = None if experts is None else getattr(module, f"{name}_bias")[experts]
        return _grouped_linear(x, getattr(module, name), ends, bias, module.is_transposed)

    first = product(rows, "gate_up_proj" if module.has_gate else "up_proj")
    if fuses_gate and experts is None:
        return product(swiglu_of_halves(first, grouped.weights), "down_proj").to(rows.dtype)
    activated = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    if experts is None:
        return product((activated * weights).to(activated.dtype), "down_proj").to(rows.dtype)
    out = product(activated, "down_proj")
    return (out * weights).to(out.dtype).to(rows.dtype)


def _outputs_row_by_row(original: Callable[..., Tensor], grouped: Grouped) -> Tensor:
    """Return the results of the module's own code for rows with one expert each."""
    return original(grouped.rows, _experts_of_rows(grouped)[:, None], grouped.weights[:, None])


def _experts_of_rows(grouped: Grouped) -> Tensor:
    """Return int64 `[rows]`; rows that belong to no expert have the last one."""
    rows = torch.arange(len(grouped.rows), dtype=grouped.ends.dtype, device=grouped.ends.device)
    return torch.searchsorted(grouped.ends, rows, right=True).clamp(max=len(grouped.ends) - 1)


class EarlyPart:
    """A part of a block that gets the same tokens as the block, and is computed ahead of the block's call of it.

    The call then takes the result. A block that calls the part first computes as it is written, and so does one whose
    part has hooks, such as the hooks of tensor parallelism, which belong to the call.

    Args:
        part: Module that takes hidden states and nothing else, changed in place.
        block: Module that calls it at most once in each of its own calls, changed in place.
    """

    def __init__(self, part: Any, block: nn.Module) -> None:
        self._part = part
        self._original = part.forward
        self._entered: Tensor | None = None
        self._early: tuple[Tensor, int, Tensor] | None = None
        part.forward = self._forward
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave, always_call=True)

    def compute(self) -> None:
        """Compute the part of the tokens that entered the block, unless the block has called it."""
        hidden = self._entered
        if hidden is not None and not self._part._forward_pre_hooks and not self._part._forward_hooks:
            self._early = hidden, hidden._version, self._original(hidden)

    def _forward(self, x: Tensor) -> Tensor:
        early, self._early, self._entered = self._early, None, None
        if early is not None:
            hidden, version, result = early
            # The part is called with the same values in the same memory, whatever their shape.
            is_dense = hidden.is_contiguous() and x.is_contiguous() and hidden.numel() == x.numel()
            is_there = hidden.untyped_storage()._cdata == x.untyped_storage()._cdata
            is_same = hidden.storage_offset() == x.storage_offset() and hidden.dtype == x.dtype
            if is_dense and is_there and is_same and hidden._version == version:
                return result.view(*x.shape[:-1], -1)
        return cast("Tensor", self._original(x))

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        self._entered, self._early = first if isinstance(first, Tensor) else None, None

    def _leave(self, *_: Any) -> None:
        self._entered, self._early = None, None


def early_part(block: nn.Module) -> EarlyPart | None:
    """Make the shared experts of a block ready to be computed early; None if there are none that can be.

    Args:
        block: Module with experts, changed in place.
    """
    shared = [part for name, part in block.named_children() if name in NAMES]
    if len(shared) != 1 or len(inspect.signature(shared[0].forward).parameters) != 1:
        return None
    return EarlyPart(shared[0], block)
