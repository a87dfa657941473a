"""Parts of layers compiled by `torch.compile`: the operations between matrix products, attention, experts and
collectives.

Each part is one graph without products and collectives. So compiled layers are split, sharded, adapted and recomputed
like others, and selective recomputation finds the products that it keeps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, activations

from rl_dtensor.model.layers import formulas
from rl_dtensor.model.layers.fusion import fuse_residuals, rotate_by
from rl_dtensor.parallel.experts import expert_modules

logger = logging.getLogger(__name__)

MAX_VARIANTS = 64
"""Maximum number of variants of one function: kinds of modules, widths, dtypes, one or several rows, with and without
gradients."""


def compile_layers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Make parts of layers run compiled code, made when they first run, once for all numbers of tokens.

    To be called before the model is split or sharded, which wraps the computation of modules. Modules that compute by
    fused kernels keep them.

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
    gated = {id(formulas.activation_of(module)) for module in modules if "forward" in vars(module)}
    norms, own_activations = [], []
    for module in modules:
        # Some activations of `transformers` take many kernels.
        is_activation = type(module).__module__ == activations.__name__ and id(module) not in gated
        if "norm" in type(module).__name__.lower() and formulas.computes_by_row(module):
            norms.append(module)
        elif is_activation and formulas.computes_by_row(module):
            own_activations.append(module)
    own, of_sum = _compiled_by_row(_own), _compiled_by_row(_of_sum)
    for module in (*norms, *own_activations):
        _compile_own(module, own, of_sum)
    known = {id(module) for module in norms}
    counts = Counter(
        {
            "norms": len(norms),
            "activations": len(own_activations),
            "gates": gates,
            "rotations": _compile_rotations(modules),
            "residuals": sum(fuse_residuals(layer, known, lambda _: True) for layer in layers),
        }
    )
    logger.info("compiled in %s: %s", type(hf).__name__, ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return counts


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors once for all sizes of their dims but the last."""
    to_graph: Any = torch.compile  # It is declared without `recompile_limit`.
    run = to_graph(function, fullgraph=True, recompile_limit=MAX_VARIANTS)

    def call(*args: Any, **kwargs: Any) -> Any:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor):
                # A size of 1 is compiled as a constant even if it is marked.
                torch._dynamo.mark_dynamic(each, [dim for dim, size in enumerate(each.shape[:-1]) if size > 1])
        return run(*args, **kwargs)

    return call


def _compiled_by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a module and tensors `[..., features]` that computes each vector of features separately."""
    run = _compiled(function)

    def call(module: nn.Module, *tensors: Tensor) -> Any:
        # Packed rows, padded rows and rows of heads have the same form this way.
        found = run(module, *(each.reshape(-1, each.shape[-1]) for each in tensors))
        outs = found if isinstance(found, tuple) else (found,)
        several = tuple(out.view(*tensors[0].shape[:-1], out.shape[-1]) for out in outs)
        return several if isinstance(found, tuple) else several[0]

    return call


def _own(module: nn.Module, x: Tensor) -> Tensor:
    return cast("Tensor", type(module).forward(module, x))


def _of_sum(module: nn.Module, x: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
    total = x + addend
    return _own(module, total), total


def _gate(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return cast("Tensor", activation(gate) * up)


def _gate_of_halves(activation: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _gate(activation, gate, up)


def _compile_own(module: Any, own: Callable[..., Tensor], of_sum: Callable[..., Any]) -> None:
    """Compile a module, without and, as `fuse_residuals` calls norms, with the sum before it."""
    original = module.forward

    @wraps(original)
    def forward(x: Tensor, addend: Tensor | None = None, *, with_sum: bool = False) -> Any:
        if addend is not None:
            return of_sum(module, x, addend)
        return (own(module, x), x) if with_sum else own(module, x)

    module.forward = forward


def _compile_gates(modules: Sequence[nn.Module]) -> int:
    """Compile the operations between the products of MLPs; return the number of these MLPs."""
    gate, gate_of_halves = _compiled_by_row(_gate), _compiled_by_row(_gate_of_halves)
    tried: dict[Any, tuple[nn.Module, bool, bool]] = {}
    count = 0
    for module in modules:
        activation = formulas.activation_of(module)
        if activation is None or list(activation.parameters()):
            continue
        kind = (type(module), str(activation), frozenset(module._modules))
        if kind not in tried:
            # All layers use one object, because compiled code belongs to one object.
            tried[kind] = (
                activation,
                formulas.is_gated_mlp(module, activation),
                formulas.is_packed_mlp(module, activation),
            )
        activation, is_gated, is_packed = tried[kind]
        if is_gated:
            _replace_gate(module, partial(gate, activation), ("gate_proj", "up_proj"))
        elif is_packed:
            _replace_gate(module, partial(gate_of_halves, activation), ("gate_up_proj",))
        count += is_gated or is_packed
    return count


def _replace_gate(module: Any, gate: Callable[..., Tensor], projections: Sequence[str]) -> None:
    @wraps(module.forward)
    def forward(x: Tensor) -> Tensor:
        return cast("Tensor", module.down_proj(gate(*(getattr(module, name)(x) for name in projections))))

    module.forward = forward


def _compile_rotations(modules: Sequence[nn.Module]) -> int:
    """Compile the rotations that attention layers call by their name; return the number of these layers."""
    compiled: dict[Any, Callable[..., Any]] = {}
    count = 0
    for module in modules:
        own = formulas.calling_rotation(module)
        if own is not None:
            rotate = own.__globals__[formulas.ROTATE]
            if rotate not in compiled:
                compiled[rotate] = _compiled(rotate)
            rotate_by(compiled[rotate], module, own)
            count += 1
    return count


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
