"""Parts of layers compiled by `torch.compile`: what lies between matrix products, attention, experts and collectives.

Each part is one graph, in which there is neither a product nor a collective. So compiled layers are split, sharded,
adapted and recomputed like others, and selective recomputation finds the products that it keeps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, activations

from rl_dtensor.model.formulas import (
    ROTATE,
    activation_of,
    calling_rotation,
    computes_by_row,
    is_gated_mlp,
    is_packed_mlp,
)
from rl_dtensor.model.fusion import fuse_residuals
from rl_dtensor.model.rotation import rotate_by
from rl_dtensor.parallel.experts import expert_modules

logger = logging.getLogger(__name__)

MOST_VARIANTS = 64
"""Maximum number of variants of one function: kinds of modules, widths, dtypes, rows that are one or several, with and
without gradients."""


def compile_layers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Make parts of layers run compiled code, made when they first run, once for all numbers of tokens.

    To be called before the model is split or sharded, which wraps what modules compute. Modules that compute by fused
    kernels keep them.

    Args:
        hf: Whole model on `meta` or with values, changed in place.
        layers: The repeated layers.

    Returns:
        Number of parts of each kind: `norms`, `activations`, `gates`, `rotations`, `residuals`.

    Raises:
        ValueError: If nothing can be compiled on this machine.
    """
    problem = compiler_problem()
    if problem:
        raise ValueError(problem)
    in_experts = {id(part) for module in expert_modules(hf) for part in module.modules()}
    modules = [module for layer in layers for module in layer.modules() if id(module) not in in_experts]
    gates = _compile_gates(modules)
    gated = {id(activation_of(module)) for module in modules if "forward" in vars(module)}
    alone = [module for module in modules if id(module) not in gated and _is_activation(module)]
    norms = [module for module in modules if _is_norm(module)]
    own, of_sum = _compiled_by_row(_own), _compiled_by_row(_of_sum)
    for module in (*norms, *alone):
        _compile_own(module, own, of_sum)
    known = {id(module) for module in norms}
    counts = Counter(
        {
            "norms": len(norms),
            "activations": len(alone),
            "gates": len(gates),
            "rotations": _compile_rotations(modules),
            "residuals": sum(fuse_residuals(layer, known, lambda _: True) for layer in layers),
        }
    )
    logger.info("compiled in %s: %s", type(hf).__name__, ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return counts


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors once for all sizes of their dims but the last."""
    to_graph: Any = torch.compile  # declared without `recompile_limit`
    run = to_graph(function, fullgraph=True, recompile_limit=MOST_VARIANTS)

    def call(*args: Any, **kwargs: Any) -> Any:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor):
                # a size of 1 is compiled as a constant, whatever is said of it
                torch._dynamo.mark_dynamic(each, [dim for dim, size in enumerate(each.shape[:-1]) if size > 1])
        return run(*args, **kwargs)

    return call


def _compiled_by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a module and tensors `[..., features]` that computes each vector of features by itself."""
    run = _compiled(function)

    def call(module: nn.Module, *tensors: Tensor) -> Any:
        # packed rows, padded ones and those of heads are alike this way
        found = run(module, *(each.reshape(-1, each.shape[-1]) for each in tensors))
        outs = found if isinstance(found, tuple) else (found,)
        several = tuple(out.view(*tensors[0].shape[:-1], out.shape[-1]) for out in outs)
        return several if isinstance(found, tuple) else several[0]

    return call


def _own(module: nn.Module, x: Tensor) -> Tensor:
    """What the code of a module's class computes."""
    out: Tensor = type(module).forward(module, x)
    return out


def _of_sum(module: nn.Module, x: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a sum, and the sum."""
    total = x + addend
    return _own(module, total), total


def _gate(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = activation(gate) * up
    return out


def _gate_of_halves(activation: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _gate(activation, gate, up)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and computes_by_row(module)


def _is_activation(module: nn.Module) -> bool:
    """Return whether a module is one of the activations of `transformers`, some of which take many kernels."""
    return type(module).__module__ == activations.__name__ and computes_by_row(module)


def _compile_own(module: Any, own: Callable[..., Tensor], of_sum: Callable[..., Any]) -> None:
    """Compile a module, alone and, as `fuse_residuals` calls norms, with the sum before it."""
    original = module.forward

    @wraps(original)
    def forward(x: Tensor, addend: Tensor | None = None, *, with_sum: bool = False) -> Any:
        if addend is not None:
            return of_sum(module, x, addend)
        return (own(module, x), x) if with_sum else own(module, x)

    module.forward = forward


def _compile_gates(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Compile what MLPs compute between their products; returns these MLPs."""
    gate, gate_of_halves = _compiled_by_row(_gate), _compiled_by_row(_gate_of_halves)
    tried: dict[Any, tuple[nn.Module, bool, bool]] = {}
    found = []
    for module in modules:
        activation = activation_of(module)
        if activation is None or list(activation.parameters()):
            continue
        kind = (type(module), str(activation), frozenset(module._modules))
        if kind not in tried:
            # one object for all layers, as compiled code is of one
            tried[kind] = activation, is_gated_mlp(module, activation), is_packed_mlp(module, activation)
        activation, is_gated, is_packed = tried[kind]
        if is_gated:
            _replace_gate(module, activation, gate)
        elif is_packed:
            _replace_gate_of_halves(module, activation, gate_of_halves)
        if is_gated or is_packed:
            found.append(module)
    return found


def _replace_gate(module: Any, activation: nn.Module, gate: Callable[..., Tensor]) -> None:
    @wraps(module.forward)
    def forward(x: Tensor) -> Tensor:
        out: Tensor = module.down_proj(gate(activation, module.gate_proj(x), module.up_proj(x)))
        return out

    module.forward = forward


def _replace_gate_of_halves(module: Any, activation: nn.Module, gate_of_halves: Callable[..., Tensor]) -> None:
    @wraps(module.forward)
    def forward(x: Tensor) -> Tensor:
        out: Tensor = module.down_proj(gate_of_halves(activation, module.gate_up_proj(x)))
        return out

    module.forward = forward


def _compile_rotations(modules: Sequence[nn.Module]) -> int:
    """Compile the rotations that attention layers call by their name; returns the number of these layers."""
    compiled: dict[Any, Callable[..., Any]] = {}
    count = 0
    for module in modules:
        own = calling_rotation(module)
        if own is not None:
            rotate = own.__globals__[ROTATE]
            if rotate not in compiled:
                compiled[rotate] = _compiled(rotate)
            rotate_by(compiled[rotate], module, own)
            count += 1
    return count


@cache
def compiler_problem() -> str:
    """Why nothing can be compiled on this machine, found out by compiling a sum; empty if it can be."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(_sum)(torch.ones(2, device=device))
    except Exception as error:  # noqa: BLE001  # whatever compilers and drivers say
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (
            "dtensor_cfg.compile needs a C++ compiler that works, and compiling a sum gave "
            f"{type(error).__name__}: {lines[0] if lines else 'no reason'}; install g++ (or set CXX), or set "
            "compile=false"
        )
    return ""


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x + x
