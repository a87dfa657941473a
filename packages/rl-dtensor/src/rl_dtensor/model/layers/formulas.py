"""Formulas that the code of a model family computes, found by trials on small tensors.

Trials compute values even if the caller makes tensors without data, so each leaves the current dispatch modes.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rl_core.torch.kernels.norm import NormForm
from rl_core.torch.kernels.rotary import plain_rotation

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names that families have for the number that is added to the mean square."""

ROTATE = "apply_rotary_pos_emb"
"""Name that families have for the function that rotates queries and keys."""

ROTATION = ["q", "k", "cos", "sin", "unsqueeze_dim"]
"""Its arguments in most families."""

ACTIVATIONS = ("act_fn", "activation_fn")
"""Names that families have for the activation of an MLP."""

PRE_NORM_LAYER = """\
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn(hidden_states=hidden_states, ...)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states"""
"""Statements of a layer whose norms come before attention and MLP, as in Llama; the dots are arguments that are
passed on under the same keyword."""

_OFTEN = 0.02
"""Share of bfloat16 values that may round differently: two orders of the same operations differ in fewer values, two
formulas in many."""

_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code for a trial that it did not foresee."""


@_disable_current_modes()
def norm_form(module: nn.Module) -> NormForm | None:
    """Return the formula of an RMSNorm; None if it is not one, or not one that kernels know.

    Args:
        module: Module with a weight `[features]` and no other parts.
    """
    if not type(module).__name__.endswith("RMSNorm") or "forward" in vars(module):
        return None
    if list(module._parameters) != ["weight"] or module._modules or module._buffers:
        return None
    weight = module._parameters["weight"]
    eps = next((vars(module)[name] for name in EPSILONS if isinstance(vars(module).get(name), float)), None)
    if eps is None or weight is None or weight.dim() != 1:
        return None
    forms = (NormForm(eps), NormForm(eps, rounds_first=False), NormForm(eps, offset=1.0, rounds_first=False))
    return next((form for form in forms if _is_norm(module, form)), None)


def _is_norm(module: nn.Module, form: NormForm) -> bool:
    generator = torch.Generator().manual_seed(0)
    # Half of the rows are so small that the epsilon counts.
    x = torch.randn(64, 16, generator=generator) * torch.tensor([[1.0], [1e-3]]).repeat(32, 1)
    weight = torch.rand(16, generator=generator) + 0.5
    wide, half = torch.float32, torch.bfloat16
    for of_x, of_weight in ((wide, wide), (half, half), (half, wide)):
        own = _with_parts(module, _parameters={"weight": nn.Parameter(weight.to(of_weight))})
        found = _tried(type(module).forward, own, x.to(of_x))
        expected = form(x.to(of_x), weight.to(of_weight))
        if found is None or found.dtype != expected.dtype:
            return False
        differs = ~torch.isclose(found.float(), expected.float(), rtol=1e-5, atol=0)
        if differs.float().mean() > (0 if of_x == wide else _OFTEN):
            return False
    return True


def activation_of(module: nn.Module) -> nn.Module | None:
    """Return the activation of an MLP; None if it is not called as in most families."""
    return next((module._modules[name] for name in ACTIVATIONS if name in module._modules), None)


@_disable_current_modes()
def is_gated_mlp(module: nn.Module, activation: Callable[[Tensor], Tensor] = F.silu) -> bool:
    """Return whether a module computes `down_proj(activation(gate_proj(x)) * up_proj(x))` and nothing else."""

    def formula(parts: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        return cast("Tensor", parts["down_proj"](activation(parts["gate_proj"](x)) * parts["up_proj"](x)))

    return _is_mlp(module, {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}, formula)


@_disable_current_modes()
def is_packed_mlp(module: nn.Module, activation: Callable[[Tensor], Tensor] = F.silu) -> bool:
    """Return whether a module computes `down_proj(activation(gate) * up)` of the halves of `gate_up_proj(x)`, and
    nothing else."""

    def formula(parts: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        gate, up = parts["gate_up_proj"](x).chunk(2, -1)
        return cast("Tensor", parts["down_proj"](activation(gate) * up))

    return _is_mlp(module, {"gate_up_proj": (4, 12), "down_proj": (6, 4)}, formula)


def _is_mlp(
    module: nn.Module,
    sizes: Mapping[str, tuple[int, int]],
    formula: Callable[[Mapping[str, nn.Module], Tensor], Tensor],
) -> bool:
    """Return whether a module with linear layers of these names computes a formula of them."""
    others = module._modules.keys() - sizes.keys()
    if not sizes.keys() <= module._modules.keys() or others - set(ACTIVATIONS) or module._parameters:
        return False
    if "forward" in vars(module) or len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = {name: nn.Linear(*size, dtype=torch.float64) for name, size in sizes.items()}
        x = torch.randn(2, 3, 4, dtype=torch.float64)
    own = _with_parts(module, _modules={**module._modules, **linear})
    found = _tried(type(module).forward, own, x)
    return found is not None and found.shape == x.shape and torch.allclose(found, formula(linear, x), rtol=1e-12)


@_disable_current_modes()
def has_plain_gate(module: nn.Module) -> bool:
    """Return whether stacked experts gate by `_apply_gate(gate_up)`: `silu(gate) * up` of the halves of
    `[tokens, 2 * features]`."""
    if "_apply_gate" not in dir(type(module)):
        return False
    x = torch.linspace(-8, 8, 48, dtype=torch.float64).view(4, 12)
    found = _tried(cast("Any", module)._apply_gate, x)
    gate, up = x.chunk(2, -1)
    return found is not None and found.shape == gate.shape and torch.allclose(found, F.silu(gate) * up, rtol=1e-12)


@cache
@_disable_current_modes()
def is_plain_rotation(rotate: Callable[..., Any]) -> bool:
    """Return whether a function of the arguments `ROTATION` rotates as Llama does, in the dtype of the products, and
    takes angles of a part of each head if it takes any."""
    generator = torch.Generator().manual_seed(0)
    for size, dtype in ((8, torch.float64), (8, torch.bfloat16), (4, torch.float64)):
        q, k, angle = (
            torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, size // 2))
        )
        # Cosines and sines of a wider dtype show whether the result is cast to the dtype of the queries.
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        cos, sin = (part if dtype == torch.float64 else part.float() for part in (cos, sin))
        found = _tried(rotate, q.to(dtype), k.to(dtype), cos, sin)
        if found is None and size == 8:
            return False
        for part, own in zip(found or (), (q, k), strict=False):
            expected = plain_rotation(own.to(dtype), cos[:, None], sin[:, None])
            if part.dtype != expected.dtype or not torch.allclose(part, expected, rtol=1e-6, atol=1e-9):
                return False
    return True


def calling_rotation(module: nn.Module) -> FunctionType | None:
    """Return the function of an attention module that calls a rotation by its name; None if there is none."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return None
    rotate = forward.__globals__.get(ROTATE)
    return forward if callable(rotate) and list(inspect.signature(rotate).parameters) == ROTATION else None


def rotating_forward(module: nn.Module) -> FunctionType | None:
    """Return the function of `calling_rotation` if that rotation is a plain one."""
    forward = calling_rotation(module)
    return forward if forward is not None and is_plain_rotation(forward.__globals__[ROTATE]) else None


@cache
def is_pre_norm_layer(kind: type[nn.Module]) -> bool:
    """Return whether the code of a layer is `PRE_NORM_LAYER`, statement by statement."""
    try:
        source = textwrap.dedent(inspect.getsource(kind.forward))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None:
        return False
    names = [argument.arg for argument in function.args.args]
    called = ["hidden_states", *names[2:], None]
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.self_attn":
            passed_on = all(each.arg in (None, "hidden_states", ast.unparse(each.value)) for each in node.keywords)
            if node.args or not passed_on or {each.arg for each in node.keywords} != set(called):
                return False
            node.keywords = [each for each in node.keywords if each.arg == "hidden_states"]
            node.args = []
    is_documented = isinstance(function.body[0], ast.Expr) and isinstance(function.body[0].value, ast.Constant)
    statements = function.body[1:] if is_documented else function.body
    return ast.unparse(ast.Module(statements, [])) == PRE_NORM_LAYER.replace(", ...", "")


def _with_parts(module: nn.Module, **parts: Mapping[str, Any]) -> Any:
    """Return a copy of a module with other `_parameters` or `_modules`; the module itself keeps its own."""
    own = copy.copy(module)
    vars(own).update({name: dict(held) for name, held in parts.items()})
    return own


def _tried(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a family's code; None if it raises."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            return function(*args)
    except _ERRORS:
        return None
