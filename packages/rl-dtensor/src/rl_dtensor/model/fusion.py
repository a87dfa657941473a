"""Layers of `transformers` models that compute by the fused kernels of `rl_core.torch.kernels`.

A module is chosen by what its code computes, as trials show (`rl_dtensor.model.formulas`), and keeps its parameters and
parts: adapters, sharding and hooks work as on the original. Tensors that the kernels do not take, such as those on a
CPU, go through the original code.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm, takes_norm
from rl_core.torch.kernels.swiglu import swiglu, swiglu_of_halves
from rl_dtensor.model.expert_layers import fuse_experts
from rl_dtensor.model.formulas import (
    activation_of,
    is_gated_mlp,
    is_packed_mlp,
    is_pre_norm_layer,
    norm_form,
    rotating_forward,
)
from rl_dtensor.model.rotation import defer_norms, fuse_rotation

logger = logging.getLogger(__name__)


def fuse_layers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Make modules of a model compute by fused kernels where these run.

    To be called before the model is split or sharded, which wraps what modules compute.

    Args:
        hf: Whole model on `meta` or with values, changed in place.
        layers: The repeated layers.

    Returns:
        Number of modules of each kind: `norms`, `mlps`, `experts`, `rotations`, `normed rotations`, `residuals`.
    """
    forms = _norm_forms(hf)
    for module in hf.modules():
        if id(module) in forms:
            _fuse_norm(module, forms[id(module)])
    rotations = [fuse_rotation(module) for layer in layers for module in layer.modules() if rotating_forward(module)]
    counts = Counter(
        {
            "norms": len(forms),
            "mlps": _fuse_mlps(hf),
            "experts": fuse_experts(hf),
            "rotations": len(rotations),
            "normed rotations": defer_norms(hf, [each for each in rotations if each.has_norms(forms)], forms),
            "residuals": sum(fuse_residuals(layer, forms, takes) for layer in layers),
        }
    )
    logger.info("fused kernels in %s: %s", type(hf).__name__, ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return counts


def _norm_forms(hf: PreTrainedModel) -> dict[int, NormForm]:
    """Formulas of the norms that kernels know, by the identity of the module."""
    tried: dict[Any, NormForm | None] = {}
    forms = {}
    for module in hf.modules():
        settings = sorted((name, value) for name, value in vars(module).items() if isinstance(value, float))
        kind = (type(module), *settings)
        if kind not in tried:
            tried[kind] = norm_form(module)
        form = tried[kind]
        if form is not None and "forward" not in vars(module):
            forms[id(module)] = form
    return forms


def _fuse_norm(module: Any, form: NormForm) -> None:
    original = module.forward

    @wraps(original)
    def forward(x: Tensor, addend: Tensor | None = None, *, with_sum: bool = False) -> Any:
        if with_sum:
            return add_rms_norm(x, addend, module.weight, form)
        return rms_norm(x, module.weight, form) if takes_norm(x, module.weight) else original(x)

    module.forward = forward


def _fuse_mlps(hf: PreTrainedModel) -> int:
    tried: dict[Any, Callable[[Any], None] | None] = {}
    count = 0
    for module in hf.modules():
        names = frozenset(module._modules)
        if "down_proj" not in names:
            continue
        kind = (type(module), str(activation_of(module)), names)
        if kind not in tried:
            fuse = {is_gated_mlp: _fuse_gated, is_packed_mlp: _fuse_packed}
            tried[kind] = next((fuse[is_kind] for is_kind in fuse if is_kind(module)), None)
        found = tried[kind]
        if found is not None:
            found(module)
            count += 1
    return count


def _fuse_gated(module: Any) -> None:
    original = module.forward

    @wraps(original)
    def forward(x: Tensor) -> Tensor:
        if not takes(x):
            out: Tensor = original(x)
        else:
            out = module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))
        return out

    module.forward = forward


def _fuse_packed(module: Any) -> None:
    original = module.forward

    @wraps(original)
    def forward(x: Tensor) -> Tensor:
        if not takes(x):
            out: Tensor = original(x)
        else:
            out = module.down_proj(swiglu_of_halves(module.gate_up_proj(x)))
        return out

    module.forward = forward


def fuse_residuals(layer: Any, norms: Container[int], takes: Callable[[Tensor], bool]) -> bool:
    """Leave the sums of a layer to the norms behind them, if its code is that of most families; whether it is.

    Args:
        layer: Layer, changed in place.
        norms: Identities of norms that also take an addend, and return the sum as well if called with `with_sum`.
        takes: Returns whether they take a tensor; the layer's own code computes with others.
    """
    kind: Any = type(layer)
    own = [layer._modules.get(name) for name in ("input_layernorm", "post_attention_layernorm")]
    if "forward" in vars(layer) or not is_pre_norm_layer(kind) or any(id(norm) not in norms for norm in own):
        return False
    original = layer.forward

    @wraps(original)
    def forward(hidden_states: Tensor, **told: Any) -> Any:
        if not takes(hidden_states):
            return original(hidden_states, **told)
        normed, residual = layer.input_layernorm(hidden_states, with_sum=True)
        attended, _ = layer.self_attn(hidden_states=normed, **{**defaults, **told})
        normed, residual = layer.post_attention_layernorm(attended, residual, with_sum=True)
        return residual + layer.mlp(normed)

    arguments = list(inspect.signature(original).parameters.values())[1:]
    defaults = {each.name: each.default for each in arguments if each.default is not each.empty}
    layer.forward = forward
    return True
