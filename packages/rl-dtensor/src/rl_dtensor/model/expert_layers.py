"""Stacked experts of `transformers` models that compute on rows grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear

from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.swiglu import swiglu_of_halves
from rl_dtensor.model.formulas import has_plain_gate
from rl_dtensor.model.shared_experts import early_part
from rl_dtensor.parallel.dispatch import Dispatch, Grouped, group_tokens, nothing
from rl_dtensor.parallel.experts import check_stacked, expert_modules

Compute = Callable[[Grouped], Tensor]
"""From the rows of a rank's experts to their weighted outputs, `[rows, hidden]`."""


def fuse_experts(hf: PreTrainedModel) -> int:
    """Make stacked experts group tokens and gate by the kernels of `rl_core.torch.kernels` where these run; their
    number.

    Their code in `transformers` sorts copies of the tokens by expert, and its results back.
    """
    modules = [module for module in expert_modules(hf) if _is_grouped(module)]
    gated = _with_plain_gates(modules)
    for module in modules:
        _group_here(module, partial(_outputs, module, fuses_gate=id(module) in gated))
    return len(modules)


def dispatch_experts(hf: PreTrainedModel, dispatch: Dispatch, *, fused: bool) -> None:
    """Make stacked experts compute on the tokens that a dispatcher brings them, and shared experts meanwhile.

    To be called before the model gets adapters or is split, which wrap what modules compute.

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
        compute = (
            partial(_outputs, module, fuses_gate=id(module) in gated) if _is_grouped(module) else _row_by_row(module)
        )
        shared = early_part(parents[id(module)])
        _compute_dispatched(module, dispatch, compute, nothing if shared is None else shared.compute)


def _is_grouped(module: nn.Module) -> bool:
    """Return whether a module computes by one of the implementations of experts in `transformers`, which group rows."""
    return {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys()


def _with_plain_gates(modules: Sequence[nn.Module]) -> set[int]:
    """Identities of the modules whose gates kernels compute."""
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
            out: Tensor = original(hidden, ids, weights)
            return out
        grouped = group_tokens(hidden, ids, weights, module.num_experts)
        return grouped.combine(compute(grouped))

    module.forward = forward


def _compute_dispatched(module: Any, dispatch: Dispatch, compute: Compute, meanwhile: Callable[[], None]) -> None:
    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        grouped = dispatch(hidden, ids, weights, module.num_experts, meanwhile)
        return grouped.combine(compute(grouped))

    module.forward = forward


def _outputs(module: Any, grouped: Grouped, *, fuses_gate: bool) -> Tensor:
    """Weighted outputs of experts that `transformers` computes by grouped products.

    The weights multiply the activations, which the backward pass has anyway; those of experts whose last product has a
    bias multiply that with it.
    """
    rows, ends = grouped.rows, grouped.ends
    experts = _experts_of_rows(grouped) if module.has_bias else None

    def product(x: Tensor, name: str) -> Tensor:
        bias = None if experts is None else getattr(module, f"{name}_bias")[experts]
        return _grouped_linear(x, getattr(module, name), ends, bias, module.is_transposed)

    first = product(rows, "gate_up_proj" if module.has_gate else "up_proj")
    if fuses_gate and experts is None:
        return product(swiglu_of_halves(first, grouped.weights), "down_proj").to(rows.dtype)
    activated = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    if experts is None:
        return product(_weighted(activated, grouped.weights), "down_proj").to(rows.dtype)
    return _weighted(product(activated, "down_proj"), grouped.weights).to(rows.dtype)


def _row_by_row(module: Any) -> Compute:
    """What the module's own code computes of rows with one expert each."""
    original = module.forward

    def compute(grouped: Grouped) -> Tensor:
        out: Tensor = original(grouped.rows, _experts_of_rows(grouped)[:, None], grouped.weights[:, None])
        return out

    return compute


def _experts_of_rows(grouped: Grouped) -> Tensor:
    """int64 `[rows]`; rows that belong to no expert have the last one."""
    rows = torch.arange(len(grouped.rows), dtype=grouped.ends.dtype, device=grouped.ends.device)
    return torch.searchsorted(grouped.ends, rows, right=True).clamp(max=len(grouped.ends) - 1)


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights[:, None]).to(x.dtype)
